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
from typing import NamedTuple

from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.action_sequence import NS_PER_S, Durations, Event
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.pipeline_schedules import Policy, Worker, policy_of
from zorse_megatron.schedule.samples import Boundaries, MicroBatch, MicroBatchKey

# The search orders thousands of plans, so what happens for every computation is kept short: chunks
# and micro-batches are numbers, and what depends on these alone is looked up.

_KINDS = {True: Kind.FORWARD, False: Kind.BACKWARD}


class Computation(NamedTuple):
    """A replica's forward, backward or weight gradients of one of its micro-batches."""

    chunk: int
    kind: Kind
    micro_batch: int


class Part(NamedTuple):
    """What a micro-batch sends to one of the next chunk, or of the previous one."""

    worker: int
    """Who receives it."""
    awaited: list[int]
    """Of each of its micro-batches in that chunk, how many parts are to come."""
    micro_batch: int
    on_its_way: int
    """How long."""


@dataclass(kw_only=True)
class ReplicaProgress:
    """One replica, while the pipeline is simulated."""

    key: Worker
    number: int
    """Whose turn it is where several start at once: the lowest one's."""
    queue: Sequence[MicroBatch]
    rounds: Sequence[int]
    """Of each micro-batch: a round goes through all chunks before the next one."""
    chunks: Sequence[int]
    awaited: Mapping[bool, Mapping[int, Sequence[int]]]
    """Forward? -> chunk -> of each micro-batch, how many parts of its input are to come."""
    durations: Mapping[int, Mapping[Kind, int]]
    """Chunk -> of each computation of a micro-batch."""
    weights: Mapping[int, int]
    """Chunk -> what a micro-batch counts in flight."""
    limit: int | None
    """Most that is in flight may count; None: no backward follows."""
    most_delayed: int | None
    """Most that weight gradients that wait may count; None: backwards compute them."""
    passes: Sequence[bool]
    """What it prefers to start, first: True for a forward."""
    reserved: Mapping[int, int]
    """Chunk -> what of the limit is kept for it, but for the first one."""
    started: dict[bool, dict[int, int]] = field(init=False)
    """Forward? -> chunk -> number of micro-batches."""
    in_flight: int = 0
    delayed: deque[Computation] = field(default_factory=deque)
    """Weight gradients that can be computed."""
    delayed_weight: int = 0
    most_held: int = 0
    """Of both together."""
    busy: bool = False
    forced: Computation | None = None

    def __post_init__(self) -> None:
        self.started = {way: dict.fromkeys(self.chunks, 0) for way in (True, False)}

    def is_ready(self, forward: bool, chunk: int) -> bool:
        """Whether there is a next micro-batch, with all of its input. While it is not busy."""
        index = self.started[forward][chunk]
        if index == len(self.queue) or self.awaited[forward][chunk][index]:
            return False
        return forward or index < self.started[True][chunk]

    def next_pass(self, *, strict: bool) -> Computation | None:
        """The forward or backward that it starts, if any: of the earliest round.

        A forward of the earliest chunk, a backward of the latest. `strict`: see `Policy`.
        """
        for forward in self.passes:
            best, first = None, (0, 0)
            for chunk, index in self.started[forward].items():
                if index == len(self.queue) or not (strict or self.is_ready(forward, chunk)):
                    continue
                if forward and not self.has_room(chunk):
                    continue
                preference = self.rounds[index], chunk if forward else -chunk
                if best is None or preference < first:
                    best, first = Computation(chunk, _KINDS[forward], index), preference
            if best is not None:
                return best if not strict or self.is_ready(forward, best.chunk) else None
        return None

    def has_room(self, chunk: int) -> bool:
        """Whether activations of one more micro-batch may be kept; those of one always may."""
        if self.limit is None or not self.in_flight:
            return True
        free = self.limit - self.in_flight - self.weights[chunk]
        return free >= 0 and (not self.reserved or free >= self._kept_for_later(chunk))

    def _kept_for_later(self, chunk: int) -> int:
        """What later chunks may still use of the room that is theirs."""
        kept = 0
        for later, most in self.reserved.items():
            if later > chunk:
                started, weight = self.started[True][later], self.weights[later]
                used = (started - self.started[False][later]) * weight
                left = (len(self.queue) - started) * weight
                kept += max(0, min(most - used, left))
        return kept

    @property
    def delays_too_many(self) -> bool:
        """Whether weight gradients come before all else, for the memory that they hold."""
        return self.most_delayed is not None and self.delayed_weight > self.most_delayed

    def start(self, work: Computation) -> None:
        """Note that it was started."""
        chunk, kind, _ = work
        self.busy = True
        self.forced = None
        if kind is Kind.WEIGHT_GRADIENT:
            self.delayed.popleft()
            return
        self.started[kind is Kind.FORWARD][chunk] += 1
        if kind is Kind.FORWARD:
            self.in_flight += self.weights[chunk]
            self.most_held = max(self.most_held, self.in_flight + self.delayed_weight)

    def end(self, work: Computation) -> None:
        """Note that it is done."""
        chunk, kind, micro_batch = work
        self.busy = False
        if kind is Kind.WEIGHT_GRADIENT:
            self.delayed_weight -= self.weights[chunk]
        elif kind is Kind.BACKWARD:
            self.in_flight -= self.weights[chunk]
            if self.most_delayed is not None:
                self.delayed_weight += self.weights[chunk]
                self.delayed.append(Computation(chunk, Kind.WEIGHT_GRADIENT, micro_batch))


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
        self.awaited = {way: self._awaited(way) for way in (True, False)}
        """Forward? -> chunk -> replica -> of each micro-batch, how many parts of its input are to
        come."""
        keys = [(group, at) for group, queues in enumerate(boundaries.queues) for at in queues]
        # Those nearest to the loss first.
        keys.sort(key=lambda key: (-max(plan.chunks_of_group(key[0])), key[1], key[0]))
        self.in_turn = [self._progress(plan, at, key) for at, key in enumerate(keys)]
        self.workers = {worker.key: worker for worker in self.in_turn}
        self.changed = set(range(len(keys)))
        """Numbers of workers that something happened to: only these can have become able to
        start."""
        self.parts: dict[tuple[int, bool], Mapping[MicroBatchKey, Sequence[Part]]] = {}
        """(chunk, forward?) -> what its micro-batches send."""
        self.running: list[tuple[int, int, int, Computation | Part]] = []
        """What goes on and what is on its way: (end, number, worker, what)."""
        self.num_running = 0

    def _awaited(self, forward: bool) -> list[dict[int, list[int]]]:
        found = []
        for chunk, group in enumerate(self.boundaries.groups):
            queues = self.boundaries.queues[group]
            parts = {replica: [0] * len(queue) for replica, queue in queues.items()}
            lower = chunk - 1 if forward else chunk
            if 0 <= lower < self.boundaries.last:
                boundary = self.boundaries.after_chunk[lower]
                pieces = boundary.by_target if forward else boundary.by_source
                for (replica, micro_batch), each in pieces.items():
                    parts[replica][micro_batch] = len(each)
            found.append(parts)
        return found

    def _progress(self, plan: Plan, number: int, key: Worker) -> ReplicaProgress:
        group, replica = key
        queue, chunks = self.boundaries.queues[group][replica], plan.chunks_of_group(group)
        weights = {
            chunk: plan.chunks[chunk].num_layers * queue[0].size if self.policy.counts_layers else 1
            for chunk in chunks
        }
        has_backward = False in self.passes
        limit = self.policy.limits[key] if has_backward else None
        prefers_backwards = group in self.policy.backwards_first
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT_GRADIENT)
        return ReplicaProgress(
            key=key,
            number=number,
            queue=queue,
            rounds=[each.turn // self.policy.samples_per_round for each in queue],
            chunks=chunks,
            awaited={
                way: {chunk: inputs[chunk][replica] for chunk in chunks}
                for way, inputs in self.awaited.items()
            },
            durations={
                chunk: {kind: self.durations.of(kind, chunk, replica) for kind in kinds}
                for chunk in chunks
            },
            weights=weights,
            limit=limit,
            most_delayed=self.policy.most_delayed[key] if has_backward else None,
            passes=self.passes[::-1] if prefers_backwards else self.passes,
            reserved=_reserved(self.policy.reserved * (limit or 0), weights),
        )

    @property
    def _num_computations(self) -> int:
        """What the whole step has all replicas do."""
        return sum(
            (len(self.passes) + (worker.most_delayed is not None))
            * len(worker.queue)
            * len(worker.chunks)
            for worker in self.in_turn
        )

    def simulate(self) -> Iterator[Event]:
        """Yield all events by start time. Complexity: O(events x (chunks of a group + log))."""
        for now, end, number, (chunk, kind, at) in self.starts():
            micro_batch = self.in_turn[number].queue[at]
            yield Event(time=now, end=end, chunk=chunk, kind=kind, micro_batch=micro_batch)

    def starts(self) -> Iterator[tuple[int, int, int, Computation]]:
        """The same as (start, end, worker's number, computation), for what orders many plans."""
        now, remaining, running = 0, self._num_computations, self.running
        while remaining or running:
            for start in self._started(now):
                remaining -= 1
                yield start
            if not running:
                self._force()
                continue
            now = running[0][0]
            while running and running[0][0] == now:
                _, _, number, happened = heappop(running)
                if isinstance(happened, Part):
                    self._arrive(happened)
                else:
                    self._end(now, number, happened)

    def _started(self, now: int) -> Iterator[tuple[int, int, int, Computation]]:
        candidates = sorted(self.changed)
        self.changed.clear()
        for number in candidates:
            worker = self.in_turn[number]
            work = None if worker.busy else self._choose(worker)
            if work is None:
                continue
            worker.start(work)
            end = now + worker.durations[work.chunk][work.kind]
            self._run_until(end, number, work)
            yield now, end, number, work

    def _run_until(self, end: int, number: int, what: Computation | Part) -> None:
        self.num_running += 1
        heappush(self.running, (end, self.num_running, number, what))

    def _choose(self, worker: ReplicaProgress) -> Computation | None:
        """What the replica starts now, if anything: weight gradients where it would idle."""
        if worker.forced:
            return worker.forced
        delayed = worker.delayed[0] if worker.delayed else None
        if worker.delays_too_many:
            return delayed
        return worker.next_pass(strict=self.policy.strict) or delayed

    def _end(self, now: int, number: int, work: Computation) -> None:
        """Pass on what was computed."""
        chunk, kind, micro_batch = work
        worker = self.in_turn[number]
        worker.end(work)
        self.changed.add(number)
        if kind is Kind.WEIGHT_GRADIENT:
            return
        way = chunk, kind is Kind.FORWARD
        if way not in self.parts:
            self.parts[way] = self._sent(*way)
        for part in self.parts[way].get((worker.key[1], micro_batch), ()):
            if part.on_its_way:
                self._run_until(now + part.on_its_way, part.worker, part)
            else:
                self._arrive(part)

    def _arrive(self, part: Part) -> None:
        part.awaited[part.micro_batch] -= 1
        self.changed.add(part.worker)

    def _sent(self, chunk: int, forward: bool) -> dict[MicroBatchKey, list[Part]]:
        """What micro-batches of a chunk send to the next one, or the previous one."""
        to, lower = (chunk + 1, chunk) if forward else (chunk - 1, chunk - 1)
        found: dict[MicroBatchKey, list[Part]] = {}
        if not 0 <= lower < self.boundaries.last:
            return found
        boundary, group = self.boundaries.after_chunk[lower], self.boundaries.groups[to]
        for sender, pieces in (boundary.by_source if forward else boundary.by_target).items():
            found[sender] = [
                Part(
                    worker=self.workers[group, target.replica].number,
                    awaited=self.awaited[forward][to][target.replica],
                    micro_batch=target.index,
                    on_its_way=self.durations.of_message(lower, piece.stop - piece.start),
                )
                for piece in pieces
                for target in (piece.target if forward else piece.source,)
            ]
        return found

    def _force(self) -> None:
        """Let a replica go on that can, whatever it should do; there always is one.

        A backward if possible, because it gives memory back; otherwise the earliest samples.
        """
        self.was_stuck = True
        ready = [
            (forward, worker.queue[at].turn, -chunk, worker.key, at)
            for worker in self.in_turn
            for forward in self.passes
            for chunk, at in worker.started[forward].items()
            if worker.is_ready(forward, chunk)
        ]
        forward, _, chunk, key, at = min(ready)
        worker = self.workers[key]
        worker.forced = Computation(-chunk, _KINDS[forward], at)
        self.changed.add(worker.number)


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
    for time, ends, number, _ in pipeline.starts():
        group = pipeline.in_turn[number].key[0]
        start, end = found.get(group, (time, ends))
        found[group] = start, max(end, ends)
    return {group: (start / NS_PER_S, end / NS_PER_S) for group, (start, end) in found.items()}


def most_held(plan: Plan) -> dict[Worker, int]:
    """The most samples times layers that each replica keeps activations of at one time.

    Those whose weight gradients wait count, too. As `pipeline_spans_s`.
    """
    pipeline = Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=False)
    deque(pipeline.starts(), maxlen=0)
    return {key: worker.most_held for key, worker in pipeline.workers.items()}
