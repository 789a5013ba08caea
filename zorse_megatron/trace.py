"""What was executed, and when: one span per action, for plots, reports and tests."""

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from zorse_megatron.files.read_write import NotWritten, write_parts

_MOST_HELD = 4096
"""Spans in memory: writing so many takes 20 ms."""
_PART_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Span:
    """One executed action. Times are seconds of the host's wall clock.

    `waited_s` is the part of the span spent waiting for the data of other ranks; `sent_bytes` what
    each exchange of ranks that share experts sends to each of them, 0 to the rank itself: of a
    layer's forward experts' numbers, tokens, weights and results, of its backward gradients of
    results, of tokens and of weights.
    """

    step: int
    action: str
    start_s: float
    end_s: float
    waited_s: float = 0.0
    sent_bytes: Sequence[Sequence[int]] = ()


def trace_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"trace-rank{rank}.json"


class Clock(Protocol):
    """Notes moments, and says later when they were."""

    def mark(self) -> Any:
        """Note this moment."""

    def has_come(self, mark: Any) -> bool:
        """Whether it is in the past; never waits."""

    def seconds(self, mark: Any) -> float:
        """Return when it was, in seconds of the host's wall clock; waits for it."""


class HostClock:
    """The host's wall clock, for devices that it waits for."""

    def mark(self) -> float:
        """Return the time."""
        return time.time()

    def has_come(self, mark: float) -> bool:
        """It has."""
        return True

    def seconds(self, mark: float) -> float:
        """Return the time that was noted."""
        return mark


class Trace:
    """Collects spans, from `first_step` for `num_steps` steps (None: all)."""

    def __init__(
        self,
        *,
        first_step: int = 0,
        num_steps: int | None = None,
        clock: Clock | None = None,
        directory: Path | None = None,
        sent: list[tuple[int, ...]] | None = None,
    ) -> None:
        """`clock`: of the device that executes the actions; None: the host's.

        `directory`: for what a long run has recorded, until it is saved; None: it stays in memory.
        `sent`: where exchanges of the action under way are noted (`Span.sent_bytes`).
        """
        self.first_step = first_step
        self.num_steps = num_steps
        self.clock: Clock = clock or HostClock()
        self._spans: list[Span] = []
        self._marked: list[tuple[Span, tuple[Any, Any], list[tuple[Any, Any]]]] = []
        """(what was executed, its start and end, those of its waits)."""
        self._waits: list[tuple[Any, Any]] | None = None
        """Of the action under way; None where nobody wants to know."""
        self._directory = directory
        self._sent = [] if sent is None else sent
        self._spool: BinaryIO | None = None
        """The first spans, each followed by a comma; others are in memory."""
        self._failure: OSError | None = None
        """Why nothing more is recorded."""

    @property
    def spans(self) -> list[Span]:
        """All spans so far that are in memory, in the order in which they were recorded."""
        self._take(len(self._marked))
        return self._spans

    def _take(self, count: int) -> None:
        """Ask the clock about the first ones that were marked."""
        marked, self._marked = self._marked[:count], self._marked[count:]
        for span, both, waits in marked:
            start_s, end_s = map(self.clock.seconds, both)
            waited_s = sum(self.clock.seconds(b) - self.clock.seconds(a) for a, b in waits)
            self._spans.append(replace(span, start_s=start_s, end_s=end_s, waited_s=waited_s))

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans that something else has timed."""
        self._spans += spans

    def wanted(self, step: int) -> bool:
        """Whether this step is recorded."""
        last = None if self.num_steps is None else self.first_step + self.num_steps
        return step >= self.first_step and (last is None or step < last)

    @contextmanager
    def record(self, step: int, action: object) -> Iterator[None]:
        """Time the block as one action."""
        self._sent.clear()
        if not self.wanted(step):
            self._waits = None
            yield
            return
        self._waits = []
        start = self.clock.mark()
        yield
        both = start, self.clock.mark()
        span = Span(step=step, action=str(action), start_s=0, end_s=0, sent_bytes=tuple(self._sent))
        self._marked.append((span, both, self._waits))
        if self._directory is not None and len(self._marked) >= _MOST_HELD:
            self._spill(self._directory)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting time of the action under way."""
        if self._waits is None:
            yield
            return
        start = self.clock.mark()
        yield
        self._waits.append((start, self.clock.mark()))

    def save(self, directory: Path, *, rank: int, waits: bool = True) -> Path:
        """Write `trace-rank<rank>.json` and return its path.

        `waits`: for what the device has still to do; False: that is left out, as it may wait for
        ranks that are gone.
        """
        if not waits:
            self._marked = [each for each in self._marked if self.clock.has_come(each[1][1])]
        path = directory / trace_name(rank)
        if self._failure is not None:
            raise NotWritten(path, self._failure, None) from self._failure
        return write_parts(path, self._parts(rank))

    def _spill(self, directory: Path) -> None:
        """Keep in a file what is in the past, but for one span; without room record no more."""
        come = takewhile(lambda each: self.clock.has_come(each[1][1]), self._marked)
        self._take(sum(1 for _ in come))
        first, self._spans = self._spans[:-1], self._spans[-1:]
        try:
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 to the end of the run
            self._spool.write(b"".join(_text(span) + b",\n" for span in first))
        except OSError as error:  # no reason to lose the training
            self._failure, self.num_steps = error, 0
            self._marked.clear()

    def _parts(self, rank: int) -> Iterator[bytes]:
        """The text of the file."""
        yield f'{{"rank": {rank}, "spans": ['.encode()
        if self._spool is not None:
            self._spool.seek(0)
            yield from iter(partial(self._spool.read, _PART_BYTES), b"")
        yield b",\n".join(map(_text, self.spans)) + b"]}\n"


def _text(span: Span) -> bytes:
    values = asdict(span)
    if not span.sent_bytes:
        del values["sent_bytes"]
    return json.dumps(values).encode()
