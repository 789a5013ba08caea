"""The order of all replicas' micro-batches, found by simulating the pipeline once.

List scheduling: each replica, whenever it is free, starts its next backward or its next forward, a
forward only if it has fewer micro-batches in flight than its limit. Which of the two it prefers,
in which order it goes through its chunks, and whether it waits for what it prefers, is the
schedule's (`one_f_one_b`, `interleaved`); micro-batches of one chunk stay in order. Durations are
those of `events`.

In a group with `split_backward` weight gradients are computed in the order of their backwards,
where the replica would idle, or before all else if more of them wait than may (`weight_gradients`).

If no replica can go on, which limits and preferences of unequal groups can bring about, the first
one in line goes on regardless of them. So the simulation always ends, and its order can be
executed: see `validate`.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappush

from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.action_sequence import (
    BACKWARD_COST,
    Arrival,
    Event,
    computation_cost,
    forward_costs,
)
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.pipeline_schedules import Policy, Worker, most_delayed
from zorse_megatron.schedule.samples import Boundaries, MicroBatch, MicroBatchKey, Piece

# How far a replica is, while a pipeline is simulated (`order`).


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


class Pipeline:
    """A plan's chunks and replicas, simulated forward in time."""

    resolution = 1
    """By how much the unit of time is finer than that of `forward_costs`."""

    def __init__(
        self, plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
    ) -> None:
        self.boundaries = boundaries
        self.policy = policy
        self.forward_only = forward_only
        self.was_stuck = False
        """Whether limits and preferences had to be disregarded."""
        costs = forward_costs(plan)
        self.workers: dict[Worker, ReplicaProgress] = {}
        for group, queues in enumerate(boundaries.queues):
            chunks = plan.chunks_of_group(group)
            for replica, queue in queues.items():
                worker = ReplicaProgress(
                    key=(group, replica),
                    queue=queue,
                    costs={chunk: self.resolution * costs[chunk][replica] for chunk in chunks},
                    limit=policy.limits[group, replica],
                    most_delayed=None if forward_only else most_delayed(plan, group, replica),
                )
                self._prepare(worker, policy.samples_per_round)
                self.workers[worker.key] = worker
        self.turns = {
            (group, replica): (-max(plan.chunks_of_group(group)), replica)
            for group, replica in self.workers
        }
        """Whose turn it is where several start at once: those nearest to the loss first."""
        self.changed = set(self.workers)
        """Workers that something happened to: only these can have become able to start."""
        self.running: list[tuple[int, int, int, Event | Arrival]] = []
        """What goes on, by when it ends."""
        self.missing: list[dict[tuple[bool, MicroBatchKey], int]] = self._dependencies()
        """Chunk -> (forward?, micro-batch) -> how many inputs have not been computed yet."""

    def _prepare(self, worker: ReplicaProgress, samples_per_round: int) -> None:
        for kind, order in ((Kind.FORWARD, worker.forwards), (Kind.BACKWARD, worker.backwards)):
            forward = kind is Kind.FORWARD
            if not forward and self.forward_only:
                continue
            for chunk in worker.costs:
                worker.done[chunk, forward] = 0
                order += [Computation(chunk=chunk, kind=kind, micro_batch=m) for m in worker.queue]
            way = 1 if forward else -1
            order.sort(
                key=lambda work: (work.micro_batch.turn // samples_per_round, way * work.chunk)
            )

    def _dependencies(self) -> list[dict[tuple[bool, MicroBatchKey], int]]:
        missing: list[dict[tuple[bool, MicroBatchKey], int]] = [{} for _ in self.boundaries.groups]
        for chunk, boundary in enumerate(self.boundaries.after_chunk):
            for key, found in boundary.by_target.items():
                missing[chunk + 1][True, key] = len(found)
            for key, found in boundary.by_source.items():
                missing[chunk][False, key] = len(found)
        return missing

    def simulate(self) -> Iterator[Event]:
        """Yield all events by start time. Complexity: O(events x log events)."""
        running, now = self.running, 0
        remaining = sum(worker.num_computations for worker in self.workers.values())
        while remaining or running:
            for event in self._startable(now):
                remaining -= 1
                heapq.heappush(running, (event.end, event.chunk, event.micro_batch.replica, event))
                yield event
            if not running:
                self._force()
                continue
            now = running[0][0]
            while running and running[0][0] == now:
                self._finish(heapq.heappop(running)[3])

    def _startable(self, now: int) -> Iterator[Event]:
        candidates = sorted(self.changed, key=self.turns.__getitem__)
        self.changed.clear()
        for key in candidates:
            worker = self.workers[key]
            work = None if worker.busy else self._choose(worker)
            if work is not None:
                yield Event(
                    time=now,
                    end=now + worker.start(work),
                    chunk=work.chunk,
                    kind=work.kind,
                    micro_batch=work.micro_batch,
                )

    def _choose(self, worker: ReplicaProgress) -> Computation | None:
        """What the replica starts now, if anything: weight gradients where it would idle."""
        if worker.forced:
            return worker.forced
        if worker.delays_too_many:
            return worker.next_delayed()
        return self._choose_pass(worker) or worker.next_delayed()

    def _choose_pass(self, worker: ReplicaProgress) -> Computation | None:
        """The forward or backward that it starts, if any."""
        has_room = self.forward_only or worker.in_flight < worker.limit
        first = self.policy.fill_first
        for forward in (first, not first):
            work = worker.preferred(forward=forward)
            if work is None or (forward and not has_room):
                continue
            if self._is_ready(worker, work):
                return work
            if self.policy.strict:
                return None
        ready = [
            work
            for work in worker.heads()
            if (has_room or not work.forward) and self._is_ready(worker, work)
        ]
        return min(ready, key=lambda w: (w.forward, w.micro_batch.turn, -w.chunk), default=None)

    def _is_ready(self, worker: ReplicaProgress, work: Computation) -> bool:
        if not work.forward and worker.done[work.chunk, True] <= work.micro_batch.index:
            return False
        return not self.missing[work.chunk].get((work.forward, work.micro_batch.key), 0)

    def _finish(self, event: Event | Arrival) -> None:
        assert isinstance(event, Event), "without timed transfers nothing is on its way"
        group = self.boundaries.groups[event.chunk]
        worker = self.workers[group, event.micro_batch.replica]
        worker.busy = False
        self.changed.add(worker.key)
        if event.kind is Kind.WEIGHT_GRADIENT:
            return
        key = event.micro_batch.key
        if event.forward:
            if event.chunk < self.boundaries.last:
                for piece in self.boundaries.after_chunk[event.chunk].by_source[key]:
                    self._pass_on(event.chunk + 1, piece, forward=True)
            return
        worker.in_flight -= 1
        if worker.most_delayed is not None:
            worker.delayed.append(
                Computation(
                    chunk=event.chunk, kind=Kind.WEIGHT_GRADIENT, micro_batch=event.micro_batch
                )
            )
        if event.chunk > 0:
            for piece in self.boundaries.after_chunk[event.chunk - 1].by_target[key]:
                self._pass_on(event.chunk - 1, piece, forward=False)

    def _pass_on(self, chunk: int, piece: Piece, *, forward: bool) -> None:
        """Give a chunk what another one computed for it."""
        micro_batch = piece.target if forward else piece.source
        self.missing[chunk][forward, micro_batch.key] -= 1
        self.changed.add((self.boundaries.groups[chunk], micro_batch.replica))

    def _force(self) -> None:
        """Let a replica go on that can, whatever it should do; there always is one.

        A backward if possible, because it gives memory back; otherwise the earliest samples.
        """
        self.was_stuck = True
        ready = [
            (work.forward, work.micro_batch.turn, -work.chunk, key, work)
            for key, worker in self.workers.items()
            for work in worker.heads()
            if self._is_ready(worker, work)
        ]
        _, _, _, key, work = min(ready, key=lambda entry: entry[:4])
        worker = self.workers[key]
        if work.forward:
            worker.limit = max(worker.limit, worker.in_flight + 1)
        worker.forced = work
        self.changed.add(key)


# Schedule a plan that gives the cost of its inter-stage transfers (`transfer` of its chunks).
#
# An order that is found without them lets a group start what has not arrived yet, and makes it
# wait for that while other work is there.
#
# What is sent at one moment queues behind what was sent before, in each direction, for as long as
# its samples occupy the links; then it is on its way for their latency, and arrives all at once, as
# where flows share a link in equal parts. So the simulation treats equal replicas alike, and a part
# of them with their part of the batch finds the same order (see `simulate.equal_ranks`).


_Way = tuple[int, bool]
"""(chunk where messages arrive, forward?): one direction of a transfer."""


def pipeline_for(
    plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
) -> Pipeline:
    """The pipeline to simulate: the plain one, which is faster, where no transfer has a cost."""
    has_costs = any(chunk.transfer is not None for chunk in plan.chunks)
    pipeline = PipelineWithTransfers if has_costs else Pipeline
    return pipeline(plan, boundaries, policy, forward_only=forward_only)


class PipelineWithTransfers(Pipeline):
    """As `Pipeline`, with messages that take time."""

    resolution = 10**9  # so that rounding to whole units of time changes nothing that counts

    def __init__(
        self, plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
    ) -> None:
        super().__init__(plan, boundaries, policy, forward_only=forward_only)
        worker = next(iter(self.workers.values()))
        whole = (1 + BACKWARD_COST) * len(worker.queue) * sum(worker.costs.values())
        self.latency: dict[_Way, int] = {}
        self.per_sample: dict[_Way, tuple[int, int]] = {}
        """Time as numerator and denominator."""
        for chunk, transfer in enumerate(chunk.transfer for chunk in plan.chunks):
            if transfer is not None:
                per_sample = whole * Fraction(transfer.load) / plan.global_batch_size
                for way in ((chunk + 1, True), (chunk, False)):
                    self.latency[way] = round(whole * Fraction(transfer.latency))
                    self.per_sample[way] = per_sample.as_integer_ratio()
        self.free: dict[_Way, int] = defaultdict(int)
        """When all that was given to a direction is sent."""
        self.leaving: dict[_Way, list[Piece]] = defaultdict(list)
        """What is sent at this moment."""
        self.num_sent = 0

    def _startable(self, now: int) -> Iterator[Event]:
        for way, pieces in self.leaving.items():
            self._send(now, way, pieces)
        self.leaving.clear()
        yield from super()._startable(now)

    def _send(self, now: int, way: _Way, pieces: list[Piece]) -> None:
        samples = sum(piece.stop - piece.start for piece in pieces)
        above, below = self.per_sample[way]
        self.free[way] = max(now, self.free[way]) + samples * above // below
        arrival = Arrival(chunk=way[0], forward=way[1], pieces=tuple(pieces))
        time = self.free[way] + self.latency[way]
        if time == now:
            self._finish(arrival)
            return
        self.num_sent += 1
        heappush(self.running, (time, -1, self.num_sent, arrival))  # before computations that end

    def _pass_on(self, chunk: int, piece: Piece, *, forward: bool) -> None:
        if (chunk, forward) in self.latency:
            self.leaving[chunk, forward].append(piece)
        else:
            super()._pass_on(chunk, piece, forward=forward)

    def _finish(self, event: Event | Arrival) -> None:
        if isinstance(event, Event):
            super()._finish(event)
            return
        for piece in event.pieces:
            super()._pass_on(event.chunk, piece, forward=event.forward)
