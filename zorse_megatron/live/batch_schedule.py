"""Global batches whose size changes in a run: when, and which micro-batches replicas then run.

The schedule is Megatron's own (`StepBatchsizeNumMicroBatchesCalculator` in
megatron/core/num_microbatches_calculator.py): from a number of tokens on, batches have a size. Each
replica runs as many micro-batches of its size as make the group done soonest.
"""

from dataclasses import dataclass
from typing import Self

from zorse_megatron.live.rebalance import Counts, ReplicaTime, best_counts, with_idle
from zorse_megatron.plan.plan import Plan, Replica

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
        steps = sorted((_number(first) // sequence_length, _number(size)) for first, size in pairs)
        firsts = [first for first, _ in steps]
        if not steps or firsts[0] or len({*firsts}) < len(firsts) or min(s for _, s in steps) < 1:
            raise ValueError(f"{text!r} is no schedule from 0 on")
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


def counts_for_batch(plan: Plan, size: int) -> Counts:
    """Micro-batches of each replica for a batch of `size` samples.

    Who runs micro-batches under the plan runs at least one, and none takes longer than there.
    Raises ValueError where no counts make the batch so.
    """
    return tuple(
        with_idle(
            plan,
            number,
            best_counts([_time(r) for r in group.replicas if r.num_microbatches], batch=size),
        )
        for number, group in enumerate(plan.groups)
    )


def has_counts(plan: Plan, size: int) -> bool:
    """Whether there are such counts."""
    try:
        counts_for_batch(plan, size)
    except ValueError:
        return False
    return True


def _time(replica: Replica) -> ReplicaTime:
    """By the plan's times; without them its counts say how fast replicas are."""
    computed_s = sum(map(sum, replica.compute_s or ()))
    return ReplicaTime(
        micro_batch_size=replica.micro_batch_size,
        num_microbatches=replica.num_microbatches,
        seconds=computed_s or 1 / replica.num_microbatches,
    )
