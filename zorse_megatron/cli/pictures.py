"""Timeline and trace of a simulated iteration. Only the timeline imports matplotlib."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import CommandError
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.schema.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.simulate.result import SimulationResult


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Where to write what; None: do not."""

    timeline: Path | None = None
    trace: Path | None = None

    def by_option(self) -> dict[str, Path | None]:
        """Option -> path."""
        return {f"--{name}": path for name, path in vars(self).items()}


def refuse_other_formats(pictures: Pictures) -> None:
    """Stop before the work at a name that says another format than the one that is written."""
    problems = [
        Problem(
            where=option,
            found=f"{path}",
            expected=f"a name that ends in {ending}",
            remedy="Pictures are PNG files, the trace is JSON.",
        )
        for option, path in pictures.by_option().items()
        for ending in [".json" if option == "--trace" else ".png"]
        if path is not None and path.suffix.lower() != ending
    ]
    if problems:
        raise CommandError("the results could not be written", problems)


def refuse_without_matplotlib(pictures: Pictures) -> None:
    """Stop before the work where a picture is wanted that could not be drawn. Not the trace."""
    if pictures.timeline is not None:
        refuse_without("plots", what="--timeline")


def save_pictures(
    pictures: Pictures, plan: Plan, result: "SimulationResult", *, title: str
) -> Sequence[Path]:
    """Write what was asked for, and return the paths."""
    written = []
    if pictures.timeline is not None:
        from zorse_megatron.plots.simulated_gantt import draw_timeline

        written.append(draw_timeline(pictures.timeline, plan=plan, result=result, title=title))
    if pictures.trace is not None:
        from zorse_megatron.simulate.chrome_trace import save_chrome_trace

        written.append(save_chrome_trace(pictures.trace, result))
    return written
