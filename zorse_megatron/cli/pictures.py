"""Timeline and trace of a simulated iteration. Only the timeline imports matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.schema.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.simulate.result import SimulationResult


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Where to write what; None: do not."""

    timeline: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw each rank's timeline.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write a trace for ui.perfetto.dev.")
    ] = None

    def refuse(self, inputs: Sequence[Path | str | None]) -> None:
        """Stop before the work at what could not be drawn or written, or has another format."""
        given = {"--timeline": self.timeline, "--trace": self.trace}
        endings = {"--timeline": ".png", "--trace": ".json"}
        problems = [
            Problem(
                where=option,
                found=f"{path}",
                expected=f"a name that ends in {endings[option]}",
                remedy="Pictures are PNG files, the trace is JSON.",
            )
            for option, path in given.items()
            if path is not None and path.suffix.lower() != endings[option]
        ]
        if problems:
            raise CommandError("the results could not be written", problems)
        if self.timeline is not None:
            refuse_without("plots", what="--timeline")
        refuse_unwritable(given, inputs=inputs)

    def save(self, plan: Plan, result: "SimulationResult", *, title: str) -> Sequence[Path]:
        """Write what was asked for, and return the paths."""
        written = []
        if self.timeline is not None:
            from zorse_megatron.plots.simulated_gantt import draw_timeline

            written.append(draw_timeline(self.timeline, plan=plan, result=result, title=title))
        if self.trace is not None:
            from zorse_megatron.simulate.chrome_trace import save_chrome_trace

            written.append(save_chrome_trace(self.trace, result))
        return written
