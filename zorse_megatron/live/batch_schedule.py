"""Global batches whose size changes in a run: when, and which micro-batches replicas then run.

The schedule is Megatron's own (`StepBatchsizeNumMicroBatchesCalculator` in
megatron/core/num_microbatches_calculator.py): from a number of tokens on, batches have a size. Each
replica runs as many micro-batches as make the group done soonest.
"""

from dataclasses import dataclass, replace
from typing import Self

from zorse_megatron.live.rebalance import ReplicaTime, best_counts
from zorse_megatron.plan.plan import Group, Plan, Replica

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """Sizes of global batches by the samples before them."""

    steps: tuple[tuple[int, int], ...]
    """(first sample, size) in ascending order; the first begins at 0."""

    @classmethod
    def parse(cls, text: str, *, sequence_length: int) -> Self:
        """Read `--step-batch-size-schedule`: "0:768 250B:1536", thresholds in tokens.

        Raises ValueError where Megatron could not use it.

        >>> BatchSchedule.parse("0:4 2K:8", sequence_length=100).steps
        ((0, 4), (20, 8))
        """
        pairs = [entry.split(":", 1) for entry in text.replace(",", " ").split()]
        try:
            numbers = [(_number(first), _number(size)) for first, size in pairs]
        except OverflowError as error:
            raise ValueError(f"{text!r} has a number that is not finite") from error
        steps = sorted((first // sequence_length, size) for first, size in numbers)
        firsts = [first for first, _ in steps]
        sizes = [size for _, size in steps]
        if not steps or firsts[0] or len({*firsts}) < len(firsts) or sizes[0] < 1:
            raise ValueError(f"{text!r} is no schedule from 0 on")
        if sizes != sorted(sizes):
            raise ValueError(f"{text!r} has batches that become smaller, which Megatron refuses")
        return cls(steps=tuple(steps))

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes, the smallest first."""
        return tuple(sorted({size for _, size in self.steps}))

    def size_after(self, consumed: int) -> int:
        """Samples in the batch that follows `consumed` samples."""
        return next(size for first, size in reversed(self.steps) if first <= consumed)

    def changes_after(self, consumed: int) -> tuple[tuple[int, int], ...]:
        """(number, size): sizes from a batch on, counted from the one after `consumed` samples."""
        found, number = [(0, self.size_after(consumed))], 0
        for first, _ in self.steps:
            if first > consumed:
                size = found[-1][1]
                batches = -(-(first - consumed) // size)
                number, consumed = number + batches, consumed + batches * size
                found.append((number, self.size_after(consumed)))
        return tuple(found)


def _number(text: str) -> int:
    word = text.strip().upper()
    factor = _SUFFIXES.get(word[-1:], 1)
    return int(float(word[:-1] if factor > 1 else word) * factor)


def plan_for_batch(plan: Plan, size: int) -> Plan:
    """The plan, with the counts of micro-batches that make `size` samples soonest.

    Who runs micro-batches under the plan runs at least one, and none takes longer than there. Where
    micro-batches are too large for that, a group's are halved until they are not, but for those of
    ranks that share experts alone. Raises ValueError where single samples, or these micro-batches,
    are too large, too.
    """
    groups = tuple(_group_for_batch(group, size) for group in plan.groups)
    return replace(plan, groups=groups, global_batch_size=size, predictions=None)


def _group_for_batch(group: Group, size: int) -> Group:
    active = [_time(each) for each in group.replicas if each.num_microbatches]
    try:
        counts = iter(best_counts(active, batch=size))
    except ValueError:
        halves = tuple(each if each.expert_parallel else _halved(each) for each in group.replicas)
        if halves == group.replicas:
            raise
        return _group_for_batch(replace(group, replicas=halves), size)
    replicas = tuple(
        each.with_count(next(counts)) if each.num_microbatches else each for each in group.replicas
    )
    return replace(group, replicas=replicas)


def _halved(replica: Replica) -> Replica:
    """The replica, with as many samples in micro-batches of half the size."""
    size = max(1, replica.micro_batch_size // 2)
    times = replica.compute_s and tuple(
        (
            forward * size / replica.micro_batch_size,
            backward * size / replica.micro_batch_size,
            wgrad * size / replica.micro_batch_size,
        )
        for forward, backward, wgrad in replica.compute_s
    )
    return replace(
        replica,
        micro_batch_size=size,
        num_microbatches=-(-replica.num_samples // size),
        compute_s=times,
        halved=None,
    )


def _time(replica: Replica) -> ReplicaTime:
    """By the plan's times; without them its counts say how fast replicas are."""
    computed_s = sum(map(sum, replica.compute_s or ()))
    return ReplicaTime(
        micro_batch_size=replica.micro_batch_size,
        num_microbatches=replica.num_microbatches,
        seconds=computed_s or 1 / replica.num_microbatches,
    )
