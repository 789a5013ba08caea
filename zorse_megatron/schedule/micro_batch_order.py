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

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.action_sequence import NS_PER_S, Durations, Event
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.pipeline_schedules import Policy, Worker, policy_of
from zorse_megatron.schedule.samples import Boundaries, Link, MicroBatch

# The search orders thousands of plans, so what happens for every computation is kept short: a
# replica's work is in lines, one for each chunk and kind, and in each line its micro-batches are
# computed in order. A message that arrives while its receiver is busy is no event: the receiver
# looks at the times of its inputs when it is free.

_NEVER = 1 << 100


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class Line:
    """A replica's computations of one kind in one chunk, one for each of its micro-batches."""

    replica: "ReplicaProgress"
    kind: Kind
    is_forward: bool
    chunk: int
    durations: Sequence[int]
    """Of each micro-batch."""
    weight: int = 1
    """What a micro-batch counts in flight."""
    started: int = 0
    """Number of micro-batches."""
    missing: list[int] = field(default_factory=list)
    """Of each micro-batch, how many parts of its input have not been sent."""
    last_part: list[int] = field(default_factory=list)
    """When the last of those that have been sent arrives."""
    arrives: list[int] = field(default_factory=list)
    """When all of it is there, as soon as that is known."""
    forwards: "Line | None" = None
    """Of a backward: the forwards that it follows."""
    weights: "Line | None" = None
    """Of a backward: the weight gradients that follow it, where they are apart."""
    links: Sequence[Sequence[Link]] = ()
    """Of each micro-batch, what it is sent to."""
    targets: "Mapping[int, Line]" = field(default_factory=dict)
    """Replica of the group that it is sent to -> the line there."""
    ways: Mapping[int, int] = field(default_factory=dict)
    """Number of samples -> how long they are on their way."""
    reserved: int = 0
    """Of the replica's limit, what is kept for this chunk's forwards."""
    kept_later: "Sequence[Line]" = ()
    """Forwards of later chunks that something is kept for."""

    def awaits(self, links: Mapping[int, Sequence[Sequence[Link]]] | None) -> None:
        """Take from where its input comes; `links`: by replica, None: it needs none."""
        number, (_, own) = len(self.replica.queue), self.replica.key
        self.missing = [0] * number if links is None else [len(each) for each in links[own]]
        self.last_part = [0] * number
        self.arrives = [_NEVER if each else 0 for each in self.missing]

    def is_ready(self, now: int) -> bool:
        """Whether there is a next micro-batch, with all of its input. While it is not busy."""
        at = self.started
        if at == len(self.arrives) or self.arrives[at] > now:
            return False
        return self.forwards is None or at < self.forwards.started

    @property
    def still_kept(self) -> int:
        """What forwards of its chunk may still use of the room that is theirs."""
        assert self.forwards is not None, "a backward's, which knows both"
        started, weight = self.forwards.started, self.weight
        used = (started - self.started) * weight
        left = (len(self.arrives) - started) * weight
        return max(0, min(self.reserved - used, left))


Computation = tuple[Line, int]
"""A forward, a backward or weight gradients of one of a replica's micro-batches."""


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class ReplicaProgress:
    """One replica, while the pipeline is simulated."""

    key: Worker
    number: int
    """Whose turn it is where several start at once: the lowest one's."""
    queue: Sequence[MicroBatch]
    rounds: Sequence[int]
    """Of each micro-batch: a round goes through all chunks before the next one."""
    limit: int | None = None
    """Most that is in flight may count; None: no backward follows."""
    most_delayed: int | None = None
    """Most that weight gradients that wait may count; None: backwards compute them."""
    passes: Sequence[Sequence[Line]] = ()
    """Forwards and backwards; first what it prefers to start, of these the earliest chunk of
    forwards and the latest of backwards."""
    in_flight: int = 0
    delayed: deque[Computation] = field(default_factory=deque)
    """Weight gradients that can be computed."""
    delayed_weight: int = 0
    most_held: int = 0
    """Of both together."""
    busy_with: Computation | None = None
    first_start: int | None = None
    ends: int = 0
    """When it is, or was last, done with what it has started."""
    forced: Computation | None = None

    @property
    def work(self) -> int:
        """How long it computes in all."""
        lines = [line for lines in self.passes for line in lines]
        weights = [line.weights for line in lines if line.weights is not None]
        return sum(sum(line.durations) for line in (*lines, *weights))

    def choose(self, now: int, *, strict: bool) -> Computation | None:
        """What it starts now, if anything: weight gradients where it would idle.

        `strict`: see `Policy`.
        """
        if self.forced is not None:
            return self.forced
        delayed = self.delayed[0] if self.delayed else None
        if self.most_delayed is not None and self.delayed_weight > self.most_delayed:
            return delayed
        return self._next_pass(now, strict) or delayed

    def _next_pass(self, now: int, strict: bool) -> Computation | None:
        """The forward or backward that it starts, if any: of the earliest round."""
        rounds, number = self.rounds, len(self.queue)
        for lines in self.passes:
            best, least = None, _NEVER
            for line in lines:
                at = line.started
                if at == number or rounds[at] >= least:
                    continue
                if not strict and not line.is_ready(now):
                    continue
                if line.is_forward and not self._has_room(line):
                    continue
                best, least = line, rounds[at]
            if best is not None:
                return (best, best.started) if not strict or best.is_ready(now) else None
        return None

    def _has_room(self, forward: Line) -> bool:
        """Whether activations of one more micro-batch may be kept; those of one always may."""
        if self.limit is None or not self.in_flight:
            return True
        free = self.limit - self.in_flight - forward.weight
        if free < 0 or not forward.kept_later:
            return free >= 0
        return free >= sum(line.still_kept for line in forward.kept_later)

    def start(self, work: Computation, now: int) -> None:
        """Note that it was started."""
        line, at = work
        self.busy_with, self.forced = work, None
        self.ends = now + line.durations[at]
        if self.first_start is None:
            self.first_start = now
        if line.kind is Kind.WEIGHT_GRADIENT:
            self.delayed.popleft()
            return
        line.started += 1
        if line.is_forward:
            self.in_flight += line.weight
            self.most_held = max(self.most_held, self.in_flight + self.delayed_weight)

    def end(self) -> Computation:
        """Note that what it was busy with is done."""
        assert self.busy_with is not None
        line, at = work = self.busy_with
        self.busy_with = None
        if line.kind is Kind.WEIGHT_GRADIENT:
            self.delayed_weight -= line.weight
        elif not line.is_forward:
            self.in_flight -= line.weight
            if line.weights is not None:
                self.delayed_weight += line.weight
                self.delayed.append((line.weights, at))
        return work


class Pipeline:
    """A plan's chunks and replicas, simulated forward in time."""

    def __init__(
        self, plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
    ) -> None:
        self.boundaries = boundaries
        self.policy = policy
        self.forward_only = forward_only
        self.was_stuck = False
        """Whether limits and preferences had to be disregarded."""
        self.durations = Durations(plan)
        keys = [(group, at) for group, queues in enumerate(boundaries.queues) for at in queues]
        # Those nearest to the loss first.
        keys.sort(key=lambda key: (-max(plan.chunks_of_group(key[0])), key[1], key[0]))
        self.lines: dict[tuple[int, bool], dict[int, Line]] = {}
        """(chunk, forward?) -> replica -> its line."""
        self.in_turn = [self._progress(plan, at, key) for at, key in enumerate(keys)]
        self.workers = {worker.key: worker for worker in self.in_turn}
        for chunk in range(boundaries.last):
            self._connect(chunk)
        self.changed = set(range(len(keys)))
        """Numbers of workers that something happened to: only these can have become able to
        start."""
        self.running: list[tuple[int, int]] = []
        """(time, number of the worker whose computation ends then), or (time, -1 - number) of one
        that gets something then."""
        self.last_part = 0
        """When the last part of an input arrives of which others are yet to be sent."""

    def _progress(self, plan: Plan, number: int, key: Worker) -> ReplicaProgress:
        group, index = key
        chunks = plan.chunks_of_group(group)
        queue, of_round = self.boundaries.queues[group][index], self.policy.samples_per_round
        rounds = [each.turn // of_round for each in queue]
        replica = ReplicaProgress(key=key, number=number, queue=queue, rounds=rounds)
        forwards = [self._line(plan, replica, Kind.FORWARD, chunk) for chunk in chunks]
        replica.passes = (forwards,)
        if self.forward_only:
            return replica
        replica.limit, replica.most_delayed = (
            self.policy.limits[key],
            self.policy.most_delayed[key],
        )
        backwards = [self._line(plan, replica, Kind.BACKWARD, chunk) for chunk in chunks]
        for forward, backward in zip(forwards, backwards, strict=True):
            backward.forwards = forward
            if replica.most_delayed is not None:
                backward.weights = self._line(plan, replica, Kind.WEIGHT_GRADIENT, forward.chunk)
        _reserve(self.policy.reserved * replica.limit, forwards, backwards)
        prefers_backwards = group in self.policy.backwards_first
        replica.passes = (forwards, backwards[::-1])[:: -1 if prefers_backwards else 1]
        return replica

    def _line(self, plan: Plan, replica: ReplicaProgress, kind: Kind, chunk: int) -> Line:
        index = replica.key[1]
        line = Line(
            replica=replica,
            kind=kind,
            is_forward=kind is Kind.FORWARD,
            chunk=chunk,
            durations=self.durations.of_each(kind, chunk, index),
        )
        if self.policy.counts_layers:
            size = plan.groups[replica.key[0]].replicas[index].micro_batch_size
            line.weight = plan.chunks[chunk].num_layers * size
        if kind is not Kind.WEIGHT_GRADIENT:
            line.awaits(self._inputs(chunk, forward=line.is_forward))
            self.lines.setdefault((chunk, line.is_forward), {})[index] = line
        return line

    def _inputs(
        self, chunk: int, *, forward: bool
    ) -> Mapping[int, Sequence[Sequence[Link]]] | None:
        lower = chunk - 1 if forward else chunk
        if not 0 <= lower < self.boundaries.last:
            return None
        boundary = self.boundaries.after_chunk[lower]
        return boundary.back if forward else boundary.onward

    def _connect(self, chunk: int) -> None:
        """Say where outputs of a chunk and gradients of the next one go."""
        boundary = self.boundaries.after_chunk[chunk]
        ways = _Ways(self.durations, chunk)
        ends = ((chunk, chunk + 1, True, boundary.onward), (chunk + 1, chunk, False, boundary.back))
        for source, target, forward, links in ends:
            if forward or not self.forward_only:
                for replica, line in self.lines[source, forward].items():
                    line.links, line.targets = links[replica], self.lines[target, forward]
                    line.ways = ways

    def simulate(self) -> Iterator[Event]:
        """Yield all events by start time. Complexity: O(events x (chunks of a group + log))."""
        for now, (line, at) in self.starts():
            yield Event(
                time=now,
                end=now + line.durations[at],
                chunk=line.chunk,
                kind=line.kind,
                micro_batch=line.replica.queue[at],
            )

    def starts(self) -> Iterator[tuple[int, Computation]]:
        """The same as (start, computation), for what orders many plans."""
        now, strict, running = 0, self.policy.strict, self.running
        remaining = self._num_computations
        while remaining:
            candidates = sorted(self.changed)
            self.changed.clear()
            for number in candidates:
                replica = self.in_turn[number]
                work = None if replica.busy_with else replica.choose(now, strict=strict)
                if work is not None:
                    replica.start(work, now)
                    heappush(running, (replica.ends, number))
                    remaining -= 1
                    yield now, work
            if not running:
                if remaining:
                    now = max(now, self.last_part)
                    self._force(now)
                continue
            now = running[0][0]
            while running and running[0][0] == now:
                _, number = heappop(running)
                if number < 0:
                    self.changed.add(-1 - number)
                else:
                    self.changed.add(number)
                    self._send(now, *self.in_turn[number].end())

    @property
    def _num_computations(self) -> int:
        """What the whole step has all replicas do."""
        passes = 1 if self.forward_only else 2
        return sum(
            (passes + (worker.most_delayed is not None)) * len(worker.queue) * len(worker.passes[0])
            for worker in self.in_turn
        )

    def _send(self, now: int, line: Line, micro_batch: int) -> None:
        """Pass on what was computed."""
        if not line.links:
            return
        targets, ways = line.targets, line.ways
        for index, at, samples in line.links[micro_batch]:
            target, arrives = targets[index], now + ways[samples]
            if arrives < target.last_part[at]:
                arrives = target.last_part[at]
            else:
                target.last_part[at] = arrives
            target.missing[at] -= 1
            if target.missing[at]:
                self.last_part = max(self.last_part, arrives)
                continue
            target.arrives[at] = arrives
            replica = target.replica
            if arrives <= now:
                self.changed.add(replica.number)
            elif replica.busy_with is None or replica.ends < arrives:
                heappush(self.running, (arrives, -1 - replica.number))

    def _force(self, now: int) -> None:
        """Let a replica go on that can, whatever it should do; there always is one.

        A backward if possible, because it gives memory back; otherwise the earliest samples.
        """
        self.was_stuck = True
        ready = [
            (line.is_forward, worker.queue[line.started].turn, -line.chunk, worker.key, line)
            for worker in self.in_turn
            for lines in worker.passes
            for line in lines
            if line.is_ready(now)
        ]
        *_, line = min(ready, key=lambda row: row[:4])
        line.replica.forced = line, line.started
        self.changed.add(line.replica.number)


class _Ways(dict[int, int]):
    """Samples -> how long they are on their way between two chunks."""

    def __init__(self, durations: Durations, chunk: int) -> None:
        self.durations = durations
        self.chunk = chunk

    def __missing__(self, samples: int) -> int:
        found = self[samples] = self.durations.of_message(self.chunk, samples)
        return found


def _reserve(whole: float, forwards: Sequence[Line], backwards: Sequence[Line]) -> None:
    """Keep a part of it for each chunk but the first one."""
    total = sum(line.weight for line in forwards)
    for line in backwards[1:] if whole else ():
        line.reserved = int(whole * line.weight / total)
    for place, forward in enumerate(forwards):
        forward.kept_later = [line for line in backwards[place + 1 :] if line.reserved]


def pipeline_spans_s(
    plan: Plan, limit_s: float = math.inf
) -> dict[int, tuple[float, float]] | None:
    """Group -> start of its first and end of its last computation, by the plan's `compute_s`.

    None where a computation ends after `limit_s`. Of 1f1b and interleaved. Complexity: as
    `Pipeline.simulate`.
    """
    pipeline = Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=False)
    if math.isinf(limit_s):
        deque(pipeline.starts(), maxlen=0)
    elif _takes_longer(pipeline, limit_s):
        return None
    found: dict[int, tuple[int, int]] = {}
    for (group, _), replica in pipeline.workers.items():
        assert replica.first_start is not None, "it has micro-batches"
        start, end = found.get(group, (replica.first_start, 0))
        found[group] = min(start, replica.first_start), max(end, replica.ends)
    return {group: (start / NS_PER_S, end / NS_PER_S) for group, (start, end) in found.items()}


def _takes_longer(pipeline: Pipeline, limit_s: float) -> bool:
    """Whether a computation ends after the limit, which is known as soon as a replica has idled for
    so long that what it has left does not fit."""
    limit = (1 + 1e-12) * NS_PER_S * limit_s + 1  # rounding must not make it shorter
    left = [replica.work for replica in pipeline.in_turn]
    for _, (line, at) in pipeline.starts():
        replica = line.replica
        left[replica.number] -= line.durations[at]
        if replica.ends + left[replica.number] > limit:
            return True
    return False


def most_held(plan: Plan) -> dict[Worker, int]:
    """The most samples times layers that each replica keeps activations of at one time.

    Those whose weight gradients wait count, too. As `pipeline_spans_s`.
    """
    pipeline = Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=False)
    deque(pipeline.starts(), maxlen=0)
    return {key: replica.most_held for key, replica in pipeline.workers.items()}
