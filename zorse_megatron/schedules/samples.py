"""Which samples go where: derived from the plan alone, the same on every rank.

Every group covers the global batch, samples 0 to `global_batch_size - 1` in Megatron's order, with
micro-batches that are contiguous intervals of it. The micro-batches of all replicas of a group are
laid out in the order in which equally loaded replicas would finish them, so that every replica
works on early samples early and the next group can start. With equal replicas this is the order
of Megatron's own data-parallel sampler (`MegatronPretrainingSampler`).

Replicas in several regions share the samples out by `region_lanes`, so that few change region.

Between two groups, a micro-batch may feed parts of several micro-batches, and be fed by several:
the pieces are the overlaps of their intervals. No divisibility is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from zorse_megatron.schedules.region_lanes import Lanes, Slot
from zorse_megatron.schema.plan.plan import Group, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One micro-batch of one replica: samples [start, stop) of the global batch.

    `index` counts the replica's own micro-batches, in execution order. `turn` is how many samples
    its group runs before it, if all replicas are equally loaded: `start`, but for regions.
    """

    replica: int
    index: int
    start: int
    stop: int
    turn: int

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


def micro_batches(group: Group, lanes: Lanes | None = None) -> tuple[MicroBatch, ...]:
    """Lay a group's micro-batches out over the global batch, in the order of their turns.

    `lanes`: of a plan with several regions.
    """
    # At (2 * index + 1) / (2 * num_microbatches) of the step, in integers.
    whole = math.lcm(*(replica.num_microbatches or 1 for replica in group.replicas))
    finish_order = sorted(
        ((2 * index + 1) * (whole // replica.num_microbatches), number, index)
        for number, replica in enumerate(group.replicas)
        for index in range(replica.num_microbatches)
    )
    sizes = [group.replicas[number].micro_batch_size for _, number, _ in finish_order]
    turns = list(accumulate(sizes, initial=0))
    starts: Sequence[int] = turns
    if lanes is not None:
        regions = [group.replicas[number].region for _, number, _ in finish_order]
        starts = lanes.starts([Slot(size=s, region=r) for s, r in zip(sizes, regions, strict=True)])
    return tuple(
        MicroBatch(replica=number, index=index, start=start, stop=start + size, turn=turn)
        for (_, number, index), start, size, turn in zip(
            finish_order, starts, sizes, turns, strict=False
        )
    )


def layouts(plan: Plan) -> tuple[tuple[MicroBatch, ...], ...]:
    """Group -> its micro-batches, in the order of their turns."""
    lanes = Lanes.of(plan)
    return tuple(micro_batches(group, lanes) for group in plan.groups)


def pieces(sources: Sequence[MicroBatch], targets: Sequence[MicroBatch]) -> tuple[Piece, ...]:
    """Overlaps of two layouts of the same global batch, in sample order.

    O(sources + targets) where these are in sample order, else O(n log n).
    """
    sources, targets = (sorted(each, key=attrgetter("start")) for each in (sources, targets))
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
    laid_out = micro_batches(plan.groups[group], Lanes.of(plan))
    return tuple(m for m in laid_out if m.replica == replica)
