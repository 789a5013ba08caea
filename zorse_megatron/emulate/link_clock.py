"""Operations on the emulated cluster's links, and when they are done.

An event queue over the simulator's network model.

An operation starts when all that take part have posted it and the one before it on its stream is
done. Its bytes then cross the links, which it shares max-min fairly with whatever else crosses
them at that time (`simulate.network`), and its latency follows.

Time only moves forward: `step` handles the earliest moment at which anything happens.
"""

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.simulate.network import Network, NetworkLoads, TaskWork

# What ranks and the conductor say to each other. Times in seconds of the emulated cluster.

Stream = tuple[str | int, ...]
"""What runs one operation at a time: a group's collectives, or one direction of a pair in it."""

Name = tuple[Stream, int]
"""An operation: the how-many-eth of its stream. All ranks that take part count alike."""

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "exchange", "broadcast", "meeting"
]
"""A meeting takes no time: what it would take is in what the ranks compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Point to point. `source` and `target`: ranks of the job."""

    source: int
    target: int
    num_bytes: int | None
    """What the source sends; None where the target says that it is ready."""

    @property
    def ranks(self) -> tuple[int, int]:
        """Those that take part."""
        return self.source, self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One operation of a group.

    `part_bytes`: of a gather, a scatter or an exchange what each rank owns of the buffer; of an
    all-reduce or a broadcast the buffer, as one part.
    """

    kind: CollectiveKind
    ranks: tuple[int, ...]
    part_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartExchange:
    """Messages between ranks of a group, all at once."""

    ranks: tuple[int, ...]
    messages: tuple[tuple[int, int, int], ...]
    """(source, target, bytes); the same on all ranks."""


Operation = Transfer | Collective | PartExchange


@dataclass(frozen=True, kw_only=True, slots=True)
class PostOperation:
    """A rank takes part in an operation from now on, and goes on with its own work."""

    now_s: float
    name: Name
    operation: Operation
    after: Name | None = None
    """One of the rank's operations that must be done before it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """A rank stops until an operation is done."""

    now_s: float
    name: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """A rank ends; nobody needs to wait for it any more."""


Request = PostOperation | Wait | Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """To `Wait`: the rank goes on at `now_s`, which is never earlier than it asked."""

    now_s: float
    done: tuple[Name, ...] = ()
    """The rank's operations that have been done since the last answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """In place of an answer: the emulation cannot proceed."""

    reason: str


# The clock of the links.


class _Kind(IntEnum):
    """What happens; at one moment in this order."""

    FLOW_END = 0
    DONE = 1
    POST = 2


@dataclass(kw_only=True)
class _Pending:
    missing: int
    work: TaskWork | None = None
    after: set[Name] = field(default_factory=set)
    """What must be done before."""


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

    def step(self) -> list[Name]:
        """Go to the next moment at which something happens, and handle all of it.

        Returns the operations that are done then.
        """
        self.now_s = self.next_s
        done: list[Name] = []
        while self._heap and self._heap[0][0] == self.now_s:
            _, kind, _, what = heapq.heappop(self._heap)
            self._handle(kind, what, done)
        for end_s, bundle, version in self.network.rebalance(self.now_s):
            self._push(end_s, _Kind.FLOW_END, (bundle, version))
        return done

    def _push(self, at_s: float, kind: _Kind, what: object) -> None:
        if at_s < self.now_s:
            raise ValueError(f"found {what} at {at_s} s; expected nothing before {self.now_s} s")
        heapq.heappush(self._heap, (at_s, kind, next(self._order), what))

    def _handle(self, kind: _Kind, what: Any, done: list[Name]) -> None:
        """`what`: (bundle, version) of a flow's end, else the operation's name."""
        if kind is _Kind.FLOW_END:
            bundle, version = what
            for number in self.network.finish(bundle, version, self.now_s):
                name = self._flowing.pop(number)
                self._push(self.now_s + self._works.pop(name).seconds_s, _Kind.DONE, name)
        elif kind is _Kind.POST:
            self._pending[what].missing -= 1
            self._start_next(what[0])
        else:
            done.append(what)
            stream, number = what
            self._next[stream] = number + 1
            self._start_next(stream)
            for held_up in sorted(self._held_up.pop(what, ()), key=repr):
                self._start_next(held_up)

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


# Load that an operation puts on the emulated cluster's links, at the planner's costs.
#
# The emulation does not verify these costs: it shares them with the planner
# (`costs.communication`), and finds out what schedule, order, overlap and runtime make of them.


class LinkModel:
    """Costs of operations between the ranks of a job."""

    def __init__(
        self,
        comm: CommCost,
        gpus: Sequence[int],
        *,
        link_factors: Mapping[str, float] | None = None,
    ) -> None:
        """`gpus`: rank of the job -> global rank of its GPU in the cluster, which `comm` knows.

        `link_factors`: name of a link -> its bandwidth is this many times what `comm` says.
        Raises SimulationError for a link that no two of the GPUs share.
        """
        self.gpus = tuple(gpus)
        self.comm = comm
        self._routes = NetworkLoads(comm, link_factors=link_factors)
        for source in self.gpus:  # so that all links are known before the first operation
            for target in self.gpus:
                if source != target:
                    self._routes.transfer(source, target, 1)
        self.capacities_bytes_per_s = self._routes.capacities
        self._works: dict[Operation, TaskWork] = {}

    def work(self, operation: Operation) -> TaskWork | None:
        """Flow and latency of an operation; None for a transfer whose size is not said."""
        if isinstance(operation, Transfer) and operation.num_bytes is None:
            return None
        if operation not in self._works:
            self._works[operation] = self._work(operation)
        return self._works[operation]

    def _work(self, operation: Operation) -> TaskWork:
        if isinstance(operation, Transfer):
            assert operation.num_bytes is not None
            ends = self.gpus[operation.source], self.gpus[operation.target]
            return self._routes.transfer(*ends, operation.num_bytes)
        if isinstance(operation, PartExchange):
            messages = {
                (self.gpus[source], self.gpus[target]): num_bytes
                for source, target, num_bytes in operation.messages
            }
            return self._routes.exchanges([(messages, 1)])
        return self._collective(operation)

    def _collective(self, collective: Collective) -> TaskWork:
        ranks = tuple(self.gpus[rank] for rank in collective.ranks)
        parts, total = collective.part_bytes, sum(collective.part_bytes)
        if len(ranks) == 1 or collective.kind == "meeting":
            return TaskWork(seconds_s=0.0)
        by_parts = {
            "reduce_scatter": self.comm.reduce_scatter_s,
            "exchange": self.comm.exchange_s,
            "all_gather": self.comm.all_gather_s,
        }
        if takes_s := by_parts.get(collective.kind):
            return self._routes.collective(ranks, total, takes_s(ranks, parts))
        if collective.kind == "broadcast":
            # The way down of the tree that an all-reduce goes up and down.
            return self._routes.collective(ranks, total, self.comm.all_reduce_s(ranks, total) / 2)
        even = (-(-total // len(ranks)),) * len(ranks)
        in_two_s = self.comm.reduce_scatter_s(ranks, even) + self.comm.all_gather_s(ranks, even)
        alone_s = min(in_two_s, self.comm.all_reduce_s(ranks, total))
        return self._routes.collective(ranks, 2 * total, alone_s)
