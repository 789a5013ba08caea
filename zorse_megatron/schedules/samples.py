"""Which samples go where: derived from the plan alone, the same on every rank.

Every group covers the global batch, samples 0 to `global_batch_size - 1` in Megatron's order, with
micro-batches that are contiguous intervals of it. The micro-batches of all replicas of a group are
laid out in the order in which equally loaded replicas would finish them, so that every replica
works on early samples early and the next group can start. With equal replicas this is the order
of Megatron's own data-parallel sampler (`MegatronPretrainingSampler`).

Between two groups, a micro-batch may feed parts of several micro-batches, and be fed by several:
the pieces are the overlaps of their intervals. No divisibility is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.schema.plan.plan import Group, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of one replica: samples [start, stop) of the global batch.

    `index` counts the replica's own micro-batches, in sample order and in execution order.
    """

    replica: int
    index: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    @property
    def key(self) -> "MicroBatchKey":
        """Its name within its group."""
        return self.replica, self.index


MicroBatchKey = tuple[int, int]
"""(replica, index) of a micro-batch in its group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Samples [start, stop) that travel from one micro-batch to one of the next group."""

    source: MicroBatch
    target: MicroBatch
    start: int
    stop: int


def micro_batches(group: Group) -> tuple[MicroBatch, ...]:
    """Lay a group's micro-batches out over the global batch, in sample order."""
    # At (2 * index + 1) / (2 * num_microbatches) of the step, in integers.
    whole = math.lcm(*(replica.num_microbatches or 1 for replica in group.replicas))
    finish_order = sorted(
        ((2 * index + 1) * (whole // replica.num_microbatches), number, index)
        for number, replica in enumerate(group.replicas)
        for index in range(replica.num_microbatches)
    )
    start = 0
    laid_out = []
    for _, number, index in finish_order:
        stop = start + group.replicas[number].micro_batch_size
        laid_out.append(MicroBatch(replica=number, index=index, start=start, stop=stop))
        start = stop
    return tuple(laid_out)


def pieces(sources: Sequence[MicroBatch], targets: Sequence[MicroBatch]) -> tuple[Piece, ...]:
    """Overlaps of two layouts of the same global batch, in sample order; O(sources + targets)."""
    found = []
    left = right = 0
    while left < len(sources) and right < len(targets):
        source, target = sources[left], targets[right]
        start, stop = max(source.start, target.start), min(source.stop, target.stop)
        if start < stop:
            found.append(Piece(source=source, target=target, start=start, stop=stop))
        if source.stop <= target.stop:
            left += 1
        if target.stop <= source.stop:
            right += 1
    return tuple(found)


def replica_micro_batches(plan: Plan, rank: int) -> tuple[MicroBatch, ...]:
    """The micro-batches that `rank` runs, in execution order."""
    group, replica = plan.replica_of_rank(rank)
    return tuple(m for m in micro_batches(plan.groups[group]) if m.replica == replica)
