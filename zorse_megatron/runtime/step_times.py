"""What a rank's iterations consist of, at the cost of two marks for each action.

On a GPU marks are events of the main stream. They are read an iteration later, by all ranks alike,
so that the GPU has come to them and nobody waits.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from zorse_megatron.live.run_status import IterationTimes, Messages
from zorse_megatron.schedule.actions import ON_LAYERS, TRANSFERS, Action
from zorse_megatron.trace import Clock

_Marks = tuple[Any, Any]
# A shorter wait may be for what was there: to look takes some tens of microseconds.
_WAITED_S = 2e-4


@dataclass(kw_only=True)
class _Iteration:
    number: int
    start: Any
    end: Any = None
    actions: list[tuple[Action, _Marks, slice]] = field(default_factory=list)
    """With its marks, and its waits."""
    waits: list[_Marks] = field(default_factory=list)
    sent: list[tuple[int, int, int, Any]] = field(default_factory=list)
    """Target, tag, bytes, mark."""
    arrived: list[tuple[int, int, int]] = field(default_factory=list)
    """Source, tag, and the number of its wait."""


class StepTimes:
    """Marks the actions of training iterations."""

    def __init__(self, clock: Clock, *, behind: int = 0, halved: tuple[int, int] = (0, 0)) -> None:
        """`behind`: iterations that the device may be behind the host; `halved`: how many of the
        first and of the last micro-batches the rank runs in two halves."""
        self.halved = halved
        self.clock = clock
        self.behind = behind
        self._now: _Iteration | None = None
        self._ended: list[_Iteration] = []
        self.messages: Messages | None = None
        """Of the iteration that was read last."""

    def begin(self, number: int) -> None:
        """An iteration's list begins."""
        self._now = _Iteration(number=number, start=self.clock.mark())

    def end(self) -> None:
        """Its list has ended."""
        now, self._now = self._now, None
        if now is not None:
            now.end = self.clock.mark()
            self._ended.append(now)

    @contextmanager
    def marking(self, action: Action) -> Iterator[None]:
        """The block is an action of the list."""
        now = self._now
        if now is None or action.kind in TRANSFERS:
            yield
            return
        start, first_wait = self.clock.mark(), len(now.waits)
        yield
        both = start, self.clock.mark()
        now.actions.append((action, both, slice(first_wait, len(now.waits))))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for messages of other ranks."""
        now = self._now
        if now is None:
            yield
            return
        start = self.clock.mark()
        yield
        now.waits.append((start, self.clock.mark()))

    def sent(self, peer: int, tag: int, num_bytes: int) -> None:
        """A message has been handed over."""
        if self._now is not None:
            self._now.sent.append((peer, tag, num_bytes, self.clock.mark()))

    def arrived(self, peer: int, tag: int) -> None:
        """The last wait was for this message."""
        if self._now is not None:
            self._now.arrived.append((peer, tag, len(self._now.waits) - 1))

    def read(self) -> IterationTimes | None:
        """The oldest iteration that has not been read and that the device has done."""
        return self._read(self._ended.pop(0)) if len(self._ended) > self.behind else None

    def _read(self, iteration: _Iteration) -> IterationTimes:
        waits_s = [self._between(*marks) for marks in iteration.waits]
        computed: dict[tuple[object, object], dict[int, float]] = defaultdict(dict)
        update_s = 0.0
        for action, marks, waits in iteration.actions:
            own_s = self._between(*marks) - sum(waits_s[waits])
            if action.kind in ON_LAYERS:
                assert action.micro_batch is not None
                computed[action.chunk, action.kind][action.micro_batch] = own_s
            else:
                update_s += own_s
        self.messages = self._messages(iteration, waits_s)
        return IterationTimes(
            number=iteration.number,
            micro_batch_s=sum(map(self._median_s, computed.values())),
            compute_s=sum(sum(each.values()) for each in computed.values()),
            waited_s=sum(waits_s),
            update_s=update_s,
            iteration_s=self._between(iteration.start, iteration.end),
        )

    def _median_s(self, computed: Mapping[int, float]) -> float:
        """Of whole micro-batches, two halves as one; `computed`: by number."""
        (first, last), number = self.halved, len(computed)
        wholes: dict[int, float] = defaultdict(float)
        for at, own_s in computed.items():
            whole, behind = at, number - 1 - at
            if at < 2 * first:
                whole = at // 2
            elif behind < 2 * last:
                whole = number - behind // 2
            wholes[whole] += own_s
        return statistics.median(wholes.values())

    def _messages(self, iteration: _Iteration, waits_s: list[float]) -> Messages:
        sent: dict[int, list[tuple[int, int, float]]] = defaultdict(list)
        for peer, tag, num_bytes, mark in iteration.sent:
            sent[peer].append((tag, num_bytes, self.clock.seconds(mark)))
        arrived: dict[int, list[tuple[int, float | None]]] = defaultdict(list)
        for peer, tag, wait in iteration.arrived:
            _, end = iteration.waits[wait]
            when = self.clock.seconds(end) if waits_s[wait] > _WAITED_S else None
            arrived[peer].append((tag, when))
        return Messages(number=iteration.number, sent=sent, arrived=arrived)

    def _between(self, start: Any, end: Any) -> float:
        return self.clock.seconds(end) - self.clock.seconds(start)


class CudaClock:
    """Marks are events of the current stream; read in the host's wall-clock time, all at the end.

    A counterpart of `trace.HostClock` for devices that the host runs ahead of; not run on one yet
    (see docs/limits.md).
    """

    def __init__(self) -> None:
        self._first: Any = None
        self._first_s = 0.0

    def mark(self) -> Any:
        """Note this point of the current stream."""
        if self._first is None:
            self._first = self._recorded()
            self._first.synchronize()
            self._first_s = time.time()
        return self._recorded()

    def has_come(self, mark: Any) -> bool:
        """Whether the device has come to a mark; it never will after an error of CUDA's."""
        try:
            return bool(mark.query())
        except RuntimeError:
            return False

    def seconds(self, mark: Any) -> float:
        """When the device came to a mark; waits until it has, and for nothing else."""
        mark.synchronize()
        return float(self._first_s + self._first.elapsed_time(mark) * 1e-3)

    @staticmethod
    def _recorded() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
