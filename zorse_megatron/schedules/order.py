"""Order of the micro-batches of all replicas, found by simulating the pipeline once.

List scheduling: each replica, whenever it is free, starts its next backward or its next forward, a
forward only if it has fewer micro-batches in flight than its limit. Which of the two it prefers,
in which order it goes through its chunks, and whether it waits for what it prefers, is the
schedule's (`one_f_one_b`, `interleaved`); micro-batches of one chunk stay in order. Durations are
those of `events`.

If no replica can go on, which limits and preferences of unequal groups can bring about, the first
one in line goes on regardless of them. So the simulation always ends, and its order can be
executed: see `validate`.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.events import BACKWARD_COST, Arrival, Event, forward_costs
from zorse_megatron.schedules.samples import MicroBatch, MicroBatchKey, Piece
from zorse_megatron.schema.plan.plan import Plan

Worker = tuple[int, int]
"""(group, replica)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a schedule asks of each replica."""

    limits: Mapping[Worker, int]
    """Most micro-batches in flight, counted once for each chunk."""
    fill_first: bool
    """Whether a replica below its limit prefers forwards to backwards."""
    samples_per_round: int
    """Samples that a replica takes through all of its chunks before those after them."""
    strict: bool = False
    """Whether a replica waits for what it prefers, although it could start something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """A computation that may be started."""

    chunk: int
    forward: bool
    micro_batch: MicroBatch


@dataclass(kw_only=True)
class _Worker:
    """One replica, while the pipeline is simulated."""

    key: Worker
    queue: Sequence[MicroBatch]
    costs: Mapping[int, int]
    """Chunk -> time of a forward."""
    limit: int
    forwards: list[_Pass] = field(default_factory=list)
    """In the order of preference, as `backwards`."""
    backwards: list[_Pass] = field(default_factory=list)
    at: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Forward? -> how far the preferred order is done."""
    done: dict[tuple[int, bool], int] = field(default_factory=dict)
    """(chunk, forward?) -> number of micro-batches."""
    in_flight: int = 0
    busy: bool = False
    forced: _Pass | None = None

    def preferred(self, *, forward: bool) -> _Pass | None:
        """The next one in the schedule's order."""
        order, at = self.forwards if forward else self.backwards, self.at[forward]
        while at < len(order) and self.is_done(order[at]):
            at += 1
        self.at[forward] = at
        return order[at] if at < len(order) else None

    def heads(self) -> Iterator[_Pass]:
        """The next one of each chunk, in each direction."""
        for (chunk, forward), count in self.done.items():
            if count < len(self.queue):
                yield _Pass(chunk=chunk, forward=forward, micro_batch=self.queue[count])

    def is_done(self, work: _Pass) -> bool:
        """Whether it has been started."""
        return work.micro_batch.index < self.done[work.chunk, work.forward]

    def start(self, work: _Pass) -> int:
        """Note that it was started; returns its duration."""
        self.busy = True
        self.forced = None
        self.done[work.chunk, work.forward] += 1
        self.in_flight += 1 if work.forward else 0
        return self.costs[work.chunk] * (1 if work.forward else BACKWARD_COST)


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
        self.workers: dict[Worker, _Worker] = {}
        for group, queues in enumerate(boundaries.queues):
            chunks = plan.chunks_of_group(group)
            for replica, queue in queues.items():
                worker = _Worker(
                    key=(group, replica),
                    queue=queue,
                    costs={chunk: self.resolution * costs[chunk][replica] for chunk in chunks},
                    limit=policy.limits[group, replica],
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

    def _prepare(self, worker: _Worker, samples_per_round: int) -> None:
        for forward, order in ((True, worker.forwards), (False, worker.backwards)):
            if not forward and self.forward_only:
                continue
            for chunk in worker.costs:
                worker.done[chunk, forward] = 0
                order += [_Pass(chunk=chunk, forward=forward, micro_batch=m) for m in worker.queue]
            way = 1 if forward else -1
            order.sort(
                key=lambda work: (work.micro_batch.start // samples_per_round, way * work.chunk)
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
        remaining = sum(len(w.forwards) + len(w.backwards) for w in self.workers.values())
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
                    forward=work.forward,
                    micro_batch=work.micro_batch,
                )

    def _choose(self, worker: _Worker) -> _Pass | None:
        """What the replica starts now, if anything."""
        if worker.forced:
            return worker.forced
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
        return min(ready, key=lambda w: (w.forward, w.micro_batch.start, -w.chunk), default=None)

    def _is_ready(self, worker: _Worker, work: _Pass) -> bool:
        if not work.forward and worker.done[work.chunk, True] <= work.micro_batch.index:
            return False
        return not self.missing[work.chunk].get((work.forward, work.micro_batch.key), 0)

    def _finish(self, event: Event | Arrival) -> None:
        assert isinstance(event, Event), "without timed transfers nothing is on its way"
        group = self.boundaries.groups[event.chunk]
        worker = self.workers[group, event.micro_batch.replica]
        worker.busy = False
        self.changed.add(worker.key)
        key = event.micro_batch.key
        if event.forward:
            if event.chunk < self.boundaries.last:
                for piece in self.boundaries.after_chunk[event.chunk].by_source[key]:
                    self._pass_on(event.chunk + 1, piece, forward=True)
            return
        worker.in_flight -= 1
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
            (work.forward, work.micro_batch.start, -work.chunk, key, work)
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
