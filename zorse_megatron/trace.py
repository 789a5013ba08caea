"""What was executed, and when: one span per action, for plots, reports and tests."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from zorse_megatron.files.write import write_text


@dataclass(frozen=True, kw_only=True)
class Span:
    """One executed action. Times are seconds of the host's wall clock.

    `waited_s` is the part of the span spent waiting for the data of other ranks.
    """

    step: int
    action: str
    start_s: float
    end_s: float
    waited_s: float = 0.0


def trace_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"trace-rank{rank}.json"


class Trace:
    """Collects spans, from `first_step` for `num_steps` steps (None: all)."""

    def __init__(self, *, first_step: int = 0, num_steps: int | None = None) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        self.spans: list[Span] = []
        self.waited_s = 0.0

    def wanted(self, step: int) -> bool:
        """Whether this step is recorded."""
        last = None if self.num_steps is None else self.first_step + self.num_steps
        return step >= self.first_step and (last is None or step < last)

    @contextmanager
    def record(self, step: int, action: object) -> Iterator[None]:
        """Time the block as one action."""
        self.waited_s = 0.0
        start_s = time.time()
        yield
        if self.wanted(step):
            self.spans.append(
                Span(
                    step=step,
                    action=str(action),
                    start_s=start_s,
                    end_s=time.time(),
                    waited_s=self.waited_s,
                )
            )

    def waited(self, seconds_s: float) -> None:
        """Add to the waiting time of the action under way."""
        self.waited_s += seconds_s

    def save(self, directory: Path, *, rank: int) -> Path:
        """Write `trace-rank<rank>.json` and return its path."""
        path = directory / trace_name(rank)
        spans = [asdict(span) for span in self.spans]
        return write_text(path, json.dumps({"rank": rank, "spans": spans}), parents=True)


def load_trace(path: Path) -> tuple[int, tuple[Span, ...]]:
    """Read back what `Trace.save` wrote: the rank and its spans."""
    data = json.loads(path.read_text())
    return data["rank"], tuple(Span(**span) for span in data["spans"])
