"""When to change counts, and to what: the same on every rank, as it is given the same times."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zorse_megatron.rebalance.counts import ReplicaTime, best_counts
from zorse_megatron.rebalance.speeds import Speed
from zorse_megatron.schedules.policy import Worker
from zorse_megatron.schema.plan.plan import Plan, Replica

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
    _steps_in_favour: int = 0
    _wish: Counts | None = None

    def add(self, step: int, seconds: Mapping[Worker, float]) -> None:
        """Take one step's seconds of a micro-batch, of every replica that has any."""
        for worker, each in seconds.items():
            speed = self.speeds.setdefault(worker, Speed(since=step))
            speed.add(step, each, _replica(self.plan, worker).num_microbatches)
        better = self._better()
        self._steps_in_favour = 0 if better is None else self._steps_in_favour + 1
        self._wish = better if self._steps_in_favour >= _PATIENCE else None

    @property
    def wish(self) -> Counts | None:
        """The counts that should be; None where they are good enough, or nothing is sure."""
        return self._wish

    def change_to(self, plan: Plan) -> None:
        """Another plan, with other counts, is in force now."""
        self.plan = plan
        self._steps_in_favour, self._wish = 0, None

    def refuse(self, counts: Counts) -> None:
        """These counts cannot be."""
        self.refused.add(counts)
        self._steps_in_favour, self._wish = 0, None

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
                replace(replica, num_microbatches=count)
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
