"""When a run changes its counts of micro-batches, and to what: the same on every rank.

Needs neither torch nor the planner. Measured seconds go in; a plan that differs in counts only, and
its action lists, come out: see docs/elastic.md.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate

from zorse_megatron.plan.plan import Plan, Replica
from zorse_megatron.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionLists,
    Kind,
    edges_of,
)
from zorse_megatron.schedule.lower import in_flight_limits, lower_plan
from zorse_megatron.schedule.pipeline_schedules import Worker
from zorse_megatron.schedule.samples import rank_micro_batches
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at
from zorse_megatron.schedule.validate import check_executable, executes_in_order

# How long a replica takes for a micro-batch now, how sure that is, and since when.


# What a computation's duration varies by, unless more is seen: a GPU's clock, other jobs on its
# host. It stands in for what a few measurements cannot tell.
USUAL_JITTER = 0.1
# Steps that an estimate rests on at most, and those in a row that tell a change from noise.
MOST_STEPS = 16
FEWEST_STEPS = 3
# A smaller change is none.
_LEAST_CHANGE = 0.05


@dataclass(kw_only=True)
class Speed:
    """The last measurements of one replica, as long as they are of one level."""

    values: list[tuple[int, float, int]] = field(default_factory=list)
    """(step, median seconds of a micro-batch, micro-batches of it)."""
    since: int = 0
    """Step with which the present level began."""

    def add(self, step: int, seconds: float, num_microbatches: int) -> None:
        """Take one step's measurement; forget what came before a change."""
        self.values.append((step, seconds, num_microbatches))
        if self._has_changed():
            self.values = self.values[-FEWEST_STEPS:]
            self.since = self.values[0][0]
        self.values = self.values[-MOST_STEPS:]

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements."""
        return len(self.values) >= FEWEST_STEPS

    @property
    def seconds(self) -> float:
        """Of one micro-batch."""
        return statistics.fmean(seconds for _, seconds, _ in self.values)

    @property
    def noise(self) -> float:
        """Standard error of `seconds`, as a part of it."""
        seen = [seconds for _, seconds, _ in self.values]
        count = sum(number for _, _, number in self.values)
        return max(USUAL_JITTER / math.sqrt(count), _spread(seen) / math.sqrt(len(seen)))

    def _has_changed(self) -> bool:
        before, recent = self.values[:-FEWEST_STEPS], self.values[-FEWEST_STEPS:]
        if not before or len(recent) < FEWEST_STEPS:
            return False
        seen = [seconds for _, seconds, _ in before]
        mean = statistics.fmean(seen)
        single = max(USUAL_JITTER / math.sqrt(recent[-1][2]), _spread(seen))
        bound = max(_LEAST_CHANGE, 2 * single)
        if len(before) < FEWEST_STEPS:  # less sure; but what is forgotten is little
            bound *= 2
        off = [seconds / mean - 1 for _, seconds, _ in recent]
        return min(off) > bound or max(off) < -bound


def _spread(seconds: list[float]) -> float:
    """Standard deviation as a part of the mean."""
    mean = statistics.fmean(seconds)
    return statistics.stdev(seconds) / mean if len(seconds) > 1 and mean else 0.0


# Counts of micro-batches with which the slowest replica of a group is done soonest.
#
# Sizes stay as they are: how long a micro-batch of another size takes has not been measured, and
# what it would keep has not been shown to fit. So does the sum of samples, exactly.


@dataclass(frozen=True, kw_only=True)
class ReplicaTime:
    """What one replica runs, and for how long."""

    micro_batch_size: int
    num_microbatches: int
    """Now; at least 1."""
    seconds: float
    """Of one micro-batch through all chunks of the replica, forward and backward."""

    @property
    def busy_s(self) -> float:
        """Of an iteration."""
        return self.num_microbatches * self.seconds


def best_counts(replicas: Sequence[ReplicaTime], *, batch: int | None = None) -> tuple[int, ...]:
    """Return the counts with the least time of the slowest replica, each at least 1.

    `batch`: samples that they make; those of now without it. Raises ValueError where no counts make
    it before the slowest replica is done now.

    Of several such counts, those closest to each replica's part of the group's rate. Complexity:
    O(replicas x log(batch)) operations on integers of as many bits as the batch has samples, for
    each of O(log) limits.
    """
    if batch is None:
        batch = sum(each.micro_batch_size * each.num_microbatches for each in replicas)
    rate = sum(each.micro_batch_size / each.seconds for each in replicas)
    low, high = batch / rate * (1 - 1e-12), max(each.busy_s for each in replicas)
    limits = sorted(
        {high}
        | {
            count * each.seconds
            for each in replicas
            for count in range(max(1, int(low / each.seconds)), int(high / each.seconds) + 1)
            if low <= count * each.seconds <= high
        }
    )
    index = bisect_left(
        limits, True, key=lambda limit: bool(_reached(replicas, limit)[-1] >> batch & 1)
    )
    if index == len(limits):
        raise ValueError(f"no counts of these micro-batches make {batch} samples in time")
    return _chosen(replicas, limits[index], batch)


def _most(each: ReplicaTime, limit_s: float) -> int:
    """Micro-batches within the limit."""
    return int(limit_s / each.seconds * (1 + 1e-12))


def _reached(replicas: Sequence[ReplicaTime], limit_s: float) -> list[int]:
    """Bit s of entry n: the first n replicas can run s samples in time, each at least one batch."""
    reached = [1]
    for each in replicas:
        reached.append(_added(reached[-1], each.micro_batch_size, _most(each, limit_s)))
    return reached


def _added(bits: int, size: int, most: int) -> int:
    """Bits s + n * size, for every bit s and every n from 1 to `most`."""
    if not most:
        return 0
    bits <<= size
    done = 1
    while done < most:
        step = min(done, most - done)
        bits |= bits << (step * size)
        done += step
    return bits


def _chosen(replicas: Sequence[ReplicaTime], limit_s: float, batch: int) -> tuple[int, ...]:
    reached = _reached(replicas, limit_s)
    counts: list[int] = []
    left = batch
    for number in range(len(replicas) - 1, -1, -1):
        each = replicas[number]
        rest = sum(other.micro_batch_size / other.seconds for other in replicas[: number + 1])
        wanted = left / rest / each.seconds
        possible = (
            count
            for count in range(1, min(_most(each, limit_s), left // each.micro_batch_size) + 1)
            if reached[number] >> (left - count * each.micro_batch_size) & 1
        )
        count = min(possible, key=lambda count: (abs(count - wanted), count))
        counts.append(count)
        left -= count * each.micro_batch_size
    return tuple(reversed(counts))


# What a change must save of an iteration, beyond what noise could feign.
LEAST_GAIN = 0.02
# Standard errors that noise is taken to feign at most.
_SURE = 3.0
# Steps in a row that must speak for a change.
_PATIENCE = 2

Counts = tuple[tuple[int, ...], ...]
"""Group -> replica -> micro-batches."""


@dataclass(kw_only=True)
class Balancer:
    """Follows the replicas' times under one plan; says which counts would be better."""

    plan: Plan
    """In force; replaced when its counts change."""
    speeds: dict[Worker, Speed] = field(default_factory=dict)
    refused: set[Counts] = field(default_factory=set)
    """Counts that cannot be, such as for lack of memory."""
    proposal: Counts | None = None
    """The counts that should be; None where they are good enough, or nothing is sure."""
    _steps_in_favour: int = 0

    def add(self, step: int, seconds: Mapping[Worker, float]) -> None:
        """Take one step's seconds of a micro-batch, of every replica that has any."""
        for worker, each in seconds.items():
            speed = self.speeds.setdefault(worker, Speed(since=step))
            speed.add(step, each, _replica(self.plan, worker).num_microbatches)
        better = self._better()
        self._steps_in_favour = 0 if better is None else self._steps_in_favour + 1
        self.proposal = better if self._steps_in_favour >= _PATIENCE else None

    def change_to(self, plan: Plan) -> None:
        """Another plan, with other counts, is in force now."""
        self.plan = plan
        self._steps_in_favour, self.proposal = 0, None

    def refuse(self, counts: Counts) -> None:
        """These counts cannot be."""
        self.refused.add(counts)
        self._steps_in_favour, self.proposal = 0, None

    def _better(self) -> Counts | None:
        groups = self._times()
        if groups is None:
            return None
        best = {number: best_counts(times) for number, times in groups.items()}
        least_s = {number: _busy_s(times, best[number]) for number, times in groups.items()}
        now_s = {number: max(each.busy_s for each in times) for number, times in groups.items()}
        target_s = max(least_s.values())
        # A group that is done in time stays as it is.
        changed = [number for number in groups if now_s[number] > target_s * (1 + 1e-9)]
        counts = tuple(
            _with_idle(self.plan, number, best[number]) if number in changed else present
            for number, present in enumerate(counts_of(self.plan))
        )
        gain = 1 - target_s / max(now_s.values())
        if not changed or counts in self.refused or gain <= LEAST_GAIN + _SURE * self._noise():
            return None
        return counts

    def _times(self) -> dict[int, list[ReplicaTime]] | None:
        """Group -> its replicas that run anything; None where a time is not known yet."""
        groups: dict[int, list[ReplicaTime]] = {}
        for worker in workers_of(self.plan):
            speed = self.speeds.get(worker)
            if speed is None or not speed.is_known:
                return None
            replica = _replica(self.plan, worker)
            time = ReplicaTime(
                micro_batch_size=replica.micro_batch_size,
                num_microbatches=replica.num_microbatches,
                seconds=speed.seconds,
            )
            groups.setdefault(worker[0], []).append(time)
        return groups

    def _noise(self) -> float:
        return max(self.speeds[worker].noise for worker in workers_of(self.plan))


def workers_of(plan: Plan) -> tuple[Worker, ...]:
    """All replicas that run anything."""
    return tuple(
        (number, index)
        for number, group in enumerate(plan.groups)
        for index, replica in enumerate(group.replicas)
        if replica.num_microbatches
    )


def counts_of(plan: Plan) -> Counts:
    """The counts of a plan."""
    return tuple(
        tuple(replica.num_microbatches for replica in group.replicas) for group in plan.groups
    )


def with_counts(plan: Plan, counts: Counts) -> Plan:
    """The same plan with other counts. What it predicts is of other counts, and left out."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                replica.with_count(count)
                for replica, count in zip(group.replicas, row, strict=True)
            ),
        )
        for group, row in zip(plan.groups, counts, strict=True)
    )
    return replace(plan, groups=groups, predictions=None)


def _replica(plan: Plan, worker: Worker) -> Replica:
    return plan.groups[worker[0]].replicas[worker[1]]


def _busy_s(times: list[ReplicaTime], counts: tuple[int, ...]) -> float:
    return max(count * each.seconds for each, count in zip(times, counts, strict=True))


def _with_idle(plan: Plan, group: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts of all replicas; those without micro-batches stay so."""
    active = iter(counts)
    return tuple(
        next(active) if replica.num_microbatches else 0 for replica in plan.groups[group].replicas
    )


# Action lists for other counts of micro-batches, that fit where those of the plan file fit.


# What the lists of a plan let its ranks hold at most, in samples: the measure of what fits.
#
# A plan's own lists have been shown to fit. Other counts fit if no rank holds more under them: of
# activations and of what weight gradients wait for no more, and of messages, which are small beside
# a layer's activations, at most one micro-batch more.


@dataclass(frozen=True, kw_only=True)
class Held:
    """The most of each that a rank holds at once."""

    activations: int
    """Samples times layers between their forward and their backward."""
    delayed: int
    """Samples times layers between a backward and its weight gradients."""
    messages: int
    """Samples that are arriving, or that have to leave."""

    def fits_in(self, other: "Held", *, micro_batch_size: int) -> bool:
        """Whether a rank that has room for `other` has room for this."""
        return (
            self.activations <= other.activations
            and self.delayed <= other.delayed
            and self.messages <= other.messages + micro_batch_size
        )


def held_by_ranks(plan: Plan, lists: ActionLists) -> tuple[Held, ...]:
    """Rank -> what its list of training lets it hold."""
    layers = [last - first for first, last in (chunk.layers for chunk in plan.chunks)]
    found = []
    for rank, actions in enumerate(lists.ranks):
        sizes = [each.size for each in rank_micro_batches(plan, rank)]
        found.append(held(actions, sizes, layers))
    return tuple(found)


def held(actions: Sequence[Action], sizes: Sequence[int], layers: Sequence[int]) -> Held:
    """What one list lets its rank hold.

    `sizes`: micro-batch -> its samples; `layers`: chunk -> how many it has.
    """
    splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in actions)
    activations = _Level()
    delayed = _Level()
    for action in actions:
        if action.kind not in COMPUTE and action.kind is not Kind.WEIGHT_GRADIENT:
            continue
        assert action.chunk is not None and action.micro_batch is not None
        amount = layers[action.chunk] * sizes[action.micro_batch]
        if action.kind is Kind.FORWARD:
            activations.add(amount)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            delayed.add(-amount)
        else:
            activations.add(-amount)
            delayed.add(amount if splits else 0)
    return Held(
        activations=activations.highest, delayed=delayed.highest, messages=_messages(actions)
    )


def _messages(actions: Sequence[Action]) -> int:
    """Received ones count from their opening to the computation that takes them."""
    changes = [Fraction(0)] * (len(actions) + 1)
    takes = {
        (action.kind is Kind.FORWARD, action.chunk, action.micro_batch): position
        for position, action in enumerate(actions)
        if action.kind in COMPUTE
    }
    posted_at = receives_posted_at(actions)
    waited_at = sends_waited_at(actions)
    for position, action in enumerate(actions):
        if action.kind in RECEIVES:
            start = posted_at[position]
            forward = action.kind is Kind.RECV_F
            stop = takes[forward, action.chunk, action.micro_batch]
        elif action.kind in SENDS:
            start, stop = position, waited_at[position]
        else:
            continue
        assert action.samples is not None
        amount = Fraction(action.samples[1] - action.samples[0])
        if action.positions is not None:  # a part of each sequence
            amount *= Fraction(action.positions.stop - action.positions.start, action.positions.of)
        changes[start] += amount
        changes[stop] -= amount
    return math.ceil(max(accumulate(changes)))


class _Level:
    def __init__(self) -> None:
        self.now = self.highest = 0

    def add(self, change: int) -> None:
        self.now += change
        self.highest = max(self.highest, self.now)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan with other counts, ready to run."""

    plan: Plan
    lists: ActionLists


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Makes lists of other counts for one plan file."""

    plan: Plan
    """As in the file: what has been shown to fit."""
    tied: bool
    limits: dict[Worker, int]
    room: tuple[Held, ...]
    """Rank -> what it holds under the plan of the file."""
    links: frozenset[tuple[int, int]]
    """Pairs of ranks that can send."""
    in_order: bool = False
    """Whether backwards wait for forwards of earlier samples."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        lists: ActionLists,
        *,
        tied: bool,
        links: frozenset[tuple[int, int]],
        in_order: bool = False,
    ) -> "Preparation":
        """`lists`: the plan's own, of training."""
        return cls(
            plan=plan,
            tied=tied,
            limits=dict(in_flight_limits(plan)),
            room=held_by_ranks(plan, lists),
            links=links,
            in_order=in_order,
        )

    def prepare(self, counts: Counts) -> Prepared | str:
        """Return what runs with these counts, or why that cannot be; see `prepare_plan`."""
        return self.prepare_plan(with_counts(self.plan, counts))

    def prepare_plan(self, plan: Plan) -> Prepared | str:
        """Return what runs under a plan of other micro-batches, or why that cannot be.

        No replica has more in flight than the plan of the file lets it have. Raises ScheduleError
        where lists could not be executed, which is an error of the lowering.
        """
        lists = lower_plan(plan, tied=self.tied, most_in_flight=self.limits)
        check_executable(
            lists, [replica.ranks for group in plan.groups for replica in group.replicas]
        )
        if self.in_order and not executes_in_order(plan, lists):
            return "backwards would come before forwards of earlier samples"
        for rank, (now, room) in enumerate(zip(held_by_ranks(plan, lists), self.room, strict=True)):
            group, index = plan.replica_of_rank(rank)
            size = plan.groups[group].replicas[index].micro_batch_size
            if not now.fits_in(room, micro_batch_size=size):
                return f"rank {rank} would hold more: {now} instead of {room}"
        new = set(edges_of([lists])) - self.links
        if new:
            source, target = min(new)
            return f"rank {source} has no link to rank {target}"
        return Prepared(plan=plan, lists=lists)
