"""The order of all replicas' micro-batches, found by simulating the pipeline once.

List scheduling: each replica, whenever it is free, starts its next forward, if it has room for more
activations (`Policy.limits`), or its next backward. Which of the two it prefers, in which order it
goes through its chunks, and whether it waits for what it prefers, is the schedule's (see
`pipeline_schedules`); micro-batches of one chunk stay in order. Durations are the plan's
(`action_sequence.Durations`), those of messages too: with them a replica does other work while they
are on their way.

In a group with `split_backward` weight gradients are computed in the order of their backwards,
where the replica would idle, or before all else if more of them wait than may.

If no replica can go on, which limits and preferences of unequal groups can bring about, the first
one in line goes on regardless of them. So the simulation always ends, and its order can be
executed: see `validate`.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.action_sequence import NS_PER_S, Durations, Event
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.pipeline_schedules import Policy, Worker, policy_of
from zorse_megatron.schedule.samples import Boundaries, MicroBatch, MicroBatchKey, Piece

_Input = tuple[int, bool, MicroBatchKey]
"""(chunk where it is needed, activations?, micro-batch): what messages bring."""


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
    chunks: Sequence[int]
    weights: Mapping[int, int]
    """Chunk -> what a micro-batch counts in flight."""
    limit: int | None
    """Most that is in flight may count; None: no backward follows."""
    most_delayed: int | None
    """Most that weight gradients that wait may count; None: backwards compute them."""
    forwards_first: bool
    reserved: Mapping[int, int]
    """Chunk -> what of the limit is kept for it, but for the first one."""
    done: dict[bool, dict[int, int]] = field(init=False)
    """Forward? -> chunk -> number of micro-batches that were started."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """(chunk, index) of forwards."""
    in_flight: int = 0
    delayed: deque[Computation] = field(default_factory=deque)
    """Weight gradients that can be computed."""
    delayed_weight: int = 0
    most_held: int = 0
    """Of both together."""
    busy: bool = False
    forced: Computation | None = None

    def __post_init__(self) -> None:
        self.done = {way: dict.fromkeys(self.chunks, 0) for way in (True, False)}

    def heads(self, kind: Kind) -> Iterator[Computation]:
        """The next one of each chunk."""
        for chunk, count in self.done[kind is Kind.FORWARD].items():
            if count < len(self.queue):
                yield Computation(chunk=chunk, kind=kind, micro_batch=self.queue[count])

    def has_room(self, chunk: int) -> bool:
        """Whether activations of one more micro-batch may be kept; those of one always may."""
        if self.limit is None or not self.in_flight:
            return True
        free = self.limit - self.in_flight - self.weights[chunk]
        return free >= self._kept_for_later(chunk)

    def _kept_for_later(self, chunk: int) -> int:
        """What later chunks may still use of the room that is theirs."""
        kept = 0
        for later, most in self.reserved.items():
            if later > chunk:
                started, weight = self.done[True][later], self.weights[later]
                used = (started - self.done[False][later]) * weight
                left = (len(self.queue) - started) * weight
                kept += max(0, min(most - used, left))
        return kept

    @property
    def delays_too_many(self) -> bool:
        """Whether weight gradients come before all else, for the memory that they hold."""
        return self.most_delayed is not None and self.delayed_weight > self.most_delayed

    def start(self, work: Computation) -> None:
        """Note that it was started."""
        self.busy = True
        self.forced = None
        if work.kind is Kind.WEIGHT_GRADIENT:
            self.delayed.popleft()
            return
        self.done[work.forward][work.chunk] += 1
        if work.forward:
            self.in_flight += self.weights[work.chunk]
            self.most_held = max(self.most_held, self.in_flight + self.delayed_weight)

    def end(self, work: Computation) -> None:
        """Note that it is done."""
        self.busy = False
        weight = self.weights[work.chunk]
        if work.kind is Kind.WEIGHT_GRADIENT:
            self.delayed_weight -= weight
        elif work.forward:
            self.ended.add((work.chunk, work.micro_batch.index))
        else:
            self.in_flight -= weight
            if self.most_delayed is not None:
                self.delayed_weight += weight
                self.delayed.append(
                    Computation(
                        chunk=work.chunk, kind=Kind.WEIGHT_GRADIENT, micro_batch=work.micro_batch
                    )
                )


class Pipeline:
    """A plan's chunks and replicas, simulated forward in time."""

    def __init__(
        self, plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
    ) -> None:
        self.boundaries = boundaries
        self.policy = policy
        self.passes = (True,) if forward_only else (True, False)
        self.was_stuck = False
        """Whether limits and preferences had to be disregarded."""
        self.durations = Durations(plan)
        layers = [chunk.num_layers for chunk in plan.chunks]
        self.workers: dict[Worker, ReplicaProgress] = {}
        for group, queues in enumerate(boundaries.queues):
            chunks = plan.chunks_of_group(group)
            for replica, queue in queues.items():
                key, size = (group, replica), queue[0].size
                by_layer = policy.counts_layers
                weights = {chunk: layers[chunk] * size if by_layer else 1 for chunk in chunks}
                limit = None if forward_only else policy.limits[key]
                self.workers[key] = ReplicaProgress(
                    key=key,
                    queue=queue,
                    chunks=chunks,
                    weights=weights,
                    limit=limit,
                    most_delayed=None if forward_only else policy.most_delayed[key],
                    forwards_first=group not in policy.backwards_first,
                    reserved=_reserved(policy.reserved * (limit or 0), weights),
                )
        self.turns = {
            (group, replica): (-max(plan.chunks_of_group(group)), replica)
            for group, replica in self.workers
        }
        """Whose turn it is where several start at once: those nearest to the loss first."""
        self.changed = set(self.workers)
        """Workers that something happened to: only these can have become able to start."""
        self.running: list[tuple[int, int, int, Computation | _Input]] = []
        """What goes on and what is on its way, by when it ends: at equal times messages first."""
        self.missing = self._dependencies()
        """How many parts of each input have not arrived yet."""

    def _dependencies(self) -> dict[_Input, int]:
        missing: dict[_Input, int] = {}
        for chunk, boundary in enumerate(self.boundaries.after_chunk):
            for key, found in boundary.by_target.items():
                missing[chunk + 1, True, key] = len(found)
            for key, found in boundary.by_source.items():
                missing[chunk, False, key] = len(found)
        return missing

    @property
    def _num_computations(self) -> int:
        """What the whole step has all replicas do."""
        return sum(
            (len(self.passes) + (worker.most_delayed is not None))
            * len(worker.queue)
            * len(worker.chunks)
            for worker in self.workers.values()
        )

    def simulate(self) -> Iterator[Event]:
        """Yield all events by start time. Complexity: O(events x (chunks of a group + log))."""
        now, remaining = 0, self._num_computations
        while remaining or self.running:
            for event in self._started(now):
                remaining -= 1
                yield event
            if not self.running:
                self._force()
                continue
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._end(now, heappop(self.running)[3])

    def _started(self, now: int) -> Iterator[Event]:
        candidates = sorted(self.changed, key=self.turns.__getitem__)
        self.changed.clear()
        for key in candidates:
            worker = self.workers[key]
            work = None if worker.busy else self._choose(worker)
            if work is None:
                continue
            worker.start(work)
            end = now + self.durations.of(work.kind, work.chunk, key[1])
            heappush(self.running, (end, 1 + work.chunk, key[1], work))
            yield Event(
                time=now, end=end, chunk=work.chunk, kind=work.kind, micro_batch=work.micro_batch
            )

    def _choose(self, worker: ReplicaProgress) -> Computation | None:
        """What the replica starts now, if anything: weight gradients where it would idle."""
        if worker.forced:
            return worker.forced
        delayed = worker.delayed[0] if worker.delayed else None
        if worker.delays_too_many:
            return delayed
        return self._choose_pass(worker) or delayed

    def _choose_pass(self, worker: ReplicaProgress) -> Computation | None:
        """The forward or backward that it starts, if any."""
        ways = self.passes if worker.forwards_first else self.passes[::-1]
        for forward in ways:
            heads: Iterator[Computation] = worker.heads(Kind.FORWARD if forward else Kind.BACKWARD)
            if forward:
                heads = (work for work in heads if worker.has_room(work.chunk))
            if not self.policy.strict:
                heads = (work for work in heads if self._is_ready(worker, work))
            best = min(heads, key=self._preference, default=None)
            if best is not None:
                is_ready = not self.policy.strict or self._is_ready(worker, best)
                return best if is_ready else None
        return None

    def _preference(self, work: Computation) -> tuple[int, int]:
        """Through all chunks with one round of samples, then with the next."""
        turn = work.micro_batch.turn // self.policy.samples_per_round
        return turn, work.chunk if work.forward else -work.chunk

    def _is_ready(self, worker: ReplicaProgress, work: Computation) -> bool:
        if not work.forward and (work.chunk, work.micro_batch.index) not in worker.ended:
            return False
        return not self.missing.get((work.chunk, work.forward, work.micro_batch.key), 0)

    def _end(self, now: int, happened: Computation | _Input) -> None:
        """Pass on what was computed, or note what has arrived."""
        if not isinstance(happened, Computation):
            self._arrive(happened)
            return
        chunk, forward, micro_batch = happened.chunk, happened.forward, happened.micro_batch
        worker = self.workers[self.boundaries.groups[chunk], micro_batch.replica]
        worker.end(happened)
        self.changed.add(worker.key)
        after = self.boundaries.after_chunk
        pieces: Sequence[Piece] = ()
        if forward and chunk < self.boundaries.last:
            pieces = after[chunk].by_source[micro_batch.key]
        elif happened.kind is Kind.BACKWARD and chunk > 0:
            pieces = after[chunk - 1].by_target[micro_batch.key]
        lower, to = (chunk, chunk + 1) if forward else (chunk - 1, chunk - 1)
        for piece in pieces:
            key = (piece.target if forward else piece.source).key
            on_its_way = self.durations.of_message(lower, piece.stop - piece.start)
            if on_its_way:
                heappush(self.running, (now + on_its_way, 0, len(self.running), (to, forward, key)))
            else:
                self._arrive((to, forward, key))

    def _arrive(self, arrived: _Input) -> None:
        chunk, _, (replica, _) = arrived
        self.missing[arrived] -= 1
        self.changed.add((self.boundaries.groups[chunk], replica))

    def _force(self) -> None:
        """Let a replica go on that can, whatever it should do; there always is one.

        A backward if possible, because it gives memory back; otherwise the earliest samples.
        """
        self.was_stuck = True
        kinds = (Kind.FORWARD, Kind.BACKWARD)[: len(self.passes)]
        ready = [
            (work.forward, work.micro_batch.turn, -work.chunk, key, work)
            for key, worker in self.workers.items()
            for kind in kinds
            for work in worker.heads(kind)
            if self._is_ready(worker, work)
        ]
        _, _, _, key, work = min(ready, key=lambda entry: entry[:4])
        self.workers[key].forced = work
        self.changed.add(key)


def _reserved(whole: float, weights: Mapping[int, int]) -> dict[int, int]:
    """What is kept of it for each chunk but the first one."""
    first, total = min(weights), sum(weights.values())
    kept = {chunk: int(whole * each / total) for chunk, each in weights.items() if chunk != first}
    return kept if whole else {}


def pipeline_spans_s(plan: Plan) -> dict[int, tuple[float, float]]:
    """Group -> start of its first and end of its last computation, by the plan's `compute_s`.

    Of 1f1b and interleaved. Complexity: as `Pipeline.simulate`.
    """
    boundaries = Boundaries(plan)
    pipeline = Pipeline(plan, boundaries, policy_of(plan), forward_only=False)
    found: dict[int, tuple[int, int]] = {}
    for event in pipeline.simulate():
        group = boundaries.groups[event.chunk]
        start, end = found.get(group, (event.time, event.end))
        found[group] = start, max(end, event.end)
    return {group: (start / NS_PER_S, end / NS_PER_S) for group, (start, end) in found.items()}


def most_held(plan: Plan) -> dict[Worker, int]:
    """The most samples times layers that each replica keeps activations of at one time.

    Those whose weight gradients wait count, too. As `pipeline_spans_s`.
    """
    pipeline = Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=False)
    deque(pipeline.simulate(), maxlen=0)
    return {key: worker.most_held for key, worker in pipeline.workers.items()}
