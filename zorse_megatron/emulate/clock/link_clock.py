"""When operations on shared links are done: an event queue over the simulator's network model.

An operation starts when all that take part have posted it and the one before it on its stream is
done. Its bytes then cross the links, which it shares max-min fairly with whatever else crosses
them at that time (`simulate.network`), and its latency follows.

Time only moves forward: `step` handles the earliest moment at which anything happens.
"""

import heapq
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from zorse_megatron.emulate.clock.messages import Name, Stream
from zorse_megatron.simulate.network import Network
from zorse_megatron.simulate.network_loads import TaskWork


class _Kind(IntEnum):
    """What happens; at one moment in this order."""

    FLOW_END = 0
    DONE = 1
    POST = 2
    ALARM = 3


@dataclass(kw_only=True)
class _Pending:
    missing: int
    work: TaskWork | None = None
    after: set[Name] = field(default_factory=set)
    """What must be done before."""


@dataclass(kw_only=True)
class ClockStep:
    """What has happened at one time."""

    time_s: float
    done: list[Name] = field(default_factory=list)
    alarms: list[Hashable] = field(default_factory=list)


class LinkClock:
    """The operations under way, and the links that they cross."""

    def __init__(self, capacities_bytes_per_s: Sequence[float]) -> None:
        self.network = Network(capacities_bytes_per_s)
        self.now_s = 0.0
        self._heap: list[tuple[float, _Kind, int, Any]] = []
        self._order = itertools.count()
        self._pending: dict[Name, _Pending] = {}
        self._next: dict[Stream, int] = {}
        self._flowing: dict[int, Name] = {}
        self._works: dict[Name, TaskWork] = {}
        self._held_up: dict[Name, set[Stream]] = {}
        """Operation -> streams whose next one may start when it is done."""

    @property
    def next_s(self) -> float:
        """When something happens next; infinite if nothing will."""
        return self._heap[0][0] if self._heap else math.inf

    def post(
        self,
        at_s: float,
        name: Name,
        *,
        members: int,
        work: TaskWork | None,
        after: Name | None = None,
    ) -> None:
        """Let one of `members` take part from `at_s` on, when `after` has been done.

        One of them at least knows the work.
        """
        pending = self._pending.setdefault(name, _Pending(missing=members))
        pending.work = pending.work or work
        if after is not None:
            pending.after.add(after)
        self._push(at_s, _Kind.POST, name)

    def alarm(self, at_s: float, token: Hashable) -> None:
        """Have `token` in the moment `at_s`, after everything else of that moment."""
        self._push(at_s, _Kind.ALARM, token)

    def step(self) -> ClockStep:
        """Go to the next moment at which something happens, and handle all of it."""
        self.now_s = self.next_s
        moment = ClockStep(time_s=self.now_s)
        while self._heap and self._heap[0][0] == self.now_s:
            _, kind, _, what = heapq.heappop(self._heap)
            self._handle(kind, what, moment)
        for end_s, bundle, version in self.network.rebalance(self.now_s):
            self._push(end_s, _Kind.FLOW_END, (bundle, version))
        return moment

    def _push(self, at_s: float, kind: _Kind, what: object) -> None:
        if at_s < self.now_s:
            raise ValueError(f"found {what} at {at_s} s; expected nothing before {self.now_s} s")
        heapq.heappush(self._heap, (at_s, kind, next(self._order), what))

    def _handle(self, kind: _Kind, what: Any, moment: ClockStep) -> None:
        """`what`: (bundle, version) of a flow's end, else the operation's name or the token."""
        if kind is _Kind.FLOW_END:
            bundle, version = what
            for number in self.network.finish(bundle, version, self.now_s):
                name = self._flowing.pop(number)
                self._push(self.now_s + self._works.pop(name).seconds_s, _Kind.DONE, name)
        elif kind is _Kind.POST:
            self._pending[what].missing -= 1
            self._start_next(what[0])
        elif kind is _Kind.DONE:
            moment.done.append(what)
            stream, number = what
            self._next[stream] = number + 1
            self._start_next(stream)
            for held_up in sorted(self._held_up.pop(what, ()), key=repr):
                self._start_next(held_up)
        else:
            moment.alarms.append(what)

    def _start_next(self, stream: Stream) -> None:
        """Start the stream's next operation if all are there; it is taken off `_pending`."""
        name = stream, self._next.get(stream, 0)
        pending = self._pending.get(name)
        if pending is None or pending.missing:
            return
        waits = [each for each in pending.after if self._next.get(each[0], 0) <= each[1]]
        for each in waits:
            self._held_up.setdefault(each, set()).add(stream)
        if waits:
            return
        work = self._pending.pop(name).work
        assert work is not None, f"nobody knows what {name} is"
        if work.flow is None:
            self._push(self.now_s + work.seconds_s, _Kind.DONE, name)
            return
        number = next(self._order)
        self._flowing[number], self._works[name] = name, work
        self.network.start(number, work.flow, self.now_s)
