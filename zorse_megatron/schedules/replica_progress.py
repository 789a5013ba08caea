"""How far a replica is, while a pipeline is simulated (`order`)."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schedules.events import computation_cost
from zorse_megatron.schedules.policy import Worker
from zorse_megatron.schedules.samples import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """A computation that may be started."""

    chunk: int
    kind: Kind
    micro_batch: MicroBatch

    @property
    def forward(self) -> bool:
        return self.kind is Kind.FORWARD


@dataclass(kw_only=True)
class ReplicaProgress:
    """One replica, while the pipeline is simulated."""

    key: Worker
    queue: Sequence[MicroBatch]
    costs: Mapping[int, int]
    """Chunk -> time of a forward."""
    limit: int
    most_delayed: int | None = None
    """Most micro-batches whose weight gradients wait; None: backwards compute them."""
    forwards: list[Computation] = field(default_factory=list)
    """In the order of preference, as `backwards`."""
    backwards: list[Computation] = field(default_factory=list)
    at: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Forward? -> how far the preferred order is done."""
    done: dict[tuple[int, bool], int] = field(default_factory=dict)
    """(chunk, forward?) -> number of micro-batches."""
    in_flight: int = 0
    delayed: deque[Computation] = field(default_factory=deque)
    """Weight gradients that can be computed."""
    busy: bool = False
    forced: Computation | None = None

    def preferred(self, *, forward: bool) -> Computation | None:
        """The next one in the schedule's order."""
        order, at = self.forwards if forward else self.backwards, self.at[forward]
        while at < len(order) and self.is_done(order[at]):
            at += 1
        self.at[forward] = at
        return order[at] if at < len(order) else None

    def heads(self) -> Iterator[Computation]:
        """The next one of each chunk, in each direction."""
        for (chunk, forward), count in self.done.items():
            if count < len(self.queue):
                kind = Kind.FORWARD if forward else Kind.BACKWARD
                yield Computation(chunk=chunk, kind=kind, micro_batch=self.queue[count])

    def next_delayed(self) -> Computation | None:
        """The weight gradients that have waited longest."""
        return self.delayed[0] if self.delayed else None

    @property
    def delays_too_many(self) -> bool:
        """Whether weight gradients come before all else, for the memory that they hold."""
        return self.most_delayed is not None and len(self.delayed) > self.most_delayed

    def is_done(self, work: Computation) -> bool:
        """Whether it has been started."""
        return work.micro_batch.index < self.done[work.chunk, work.forward]

    def start(self, work: Computation) -> int:
        """Note that it was started; returns its duration."""
        self.busy = True
        self.forced = None
        if work.kind is Kind.WEIGHT_GRADIENT:
            self.delayed.popleft()
        else:
            self.done[work.chunk, work.forward] += 1
            self.in_flight += 1 if work.forward else 0
        splits = self.most_delayed is not None
        return self.costs[work.chunk] * computation_cost(work.kind, splits=splits)

    @property
    def num_computations(self) -> int:
        """What the whole step has it do."""
        backwards = len(self.backwards)
        return len(self.forwards) + (1 if self.most_delayed is None else 2) * backwards
