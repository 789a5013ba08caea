"""How many parameters of a plan each rank holds and owns, and who exchanges them.

Where all replicas have the same parts, ranks with the same part cut what they hold into shards, as
a group of single ranks does. Where they differ, what is owned and what is sent follows from
overlaps (`schedule.tensor_parallel_parts`). There a layer counts as three tensors: all that sets
cut by KV groups, all that they cut by columns of the MLP, and all that each rank has whole; so
shards are off the runtime's by its rounding to 64 elements of each tensor.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.plan.plan import Replica
from zorse_megatron.schedule.shards import shard_bounds
from zorse_megatron.schedule.tensor_parallel_parts import (
    Messages,
    OwnedBlock,
    TensorPart,
    TpPartition,
    UnitKind,
    gather_messages,
    owned_blocks,
    sum_messages,
)


@dataclass(frozen=True, kw_only=True)
class MixedTpUnit:
    """Parameters that replicas that differ in TP shards exchange at once, such as a layer, and how
    many like it."""

    cut: Mapping[UnitKind, int]
    """Elements of which each rank of a TP group has a part."""
    whole: int
    """Elements that each rank has."""
    count: int = 1

    def blocks(self, replicas: Sequence[Replica]) -> Iterator[OwnedBlock]:
        """Who owns what of one of them."""
        apart = [part for replica in replicas for part in _apart(replica)]
        for kind, elements in self.cut.items():
            holders = replicas if kind == "experts" else apart
            if elements:
                weights = [each.shard_weight for each in holders]
                yield from owned_blocks([_cut(each, kind, elements) for each in holders], weights)
        if self.whole:
            whole = TensorPart(shape=(self.whole,), axis=None)
            yield from owned_blocks(
                [dict.fromkeys(each.ranks, whole) for each in apart],
                [each.shard_weight for each in apart],
            )


def _apart(replica: Replica) -> Iterator[Replica]:
    """The replica; of ranks that share experts alone one for each, as to all else."""
    shared = replica.expert_parallel
    if shared is None:
        yield replica
        return
    for index, rank in enumerate(replica.ranks):
        weight = replica.shard_weight * shared.weight_of(index)
        yield replace(replica, ranks=(rank,), shard_weight=weight, expert_parallel=None)


def _cut(replica: Replica, kind: UnitKind, elements: int) -> dict[int, TensorPart]:
    """Rank -> its part of a flat tensor."""
    if len(replica.ranks) == 1:
        return {replica.ranks[0]: TensorPart(shape=(elements,), axis=None)}
    tp_shards = TpPartition.of(replica)
    bounds = {
        rank: tp_shards.interval(kind, index, elements) for index, rank in enumerate(replica.ranks)
    }
    return {
        rank: TensorPart(shape=(elements,), axis=0, pieces=((start, stop),) if stop > start else ())
        for rank, (start, stop) in bounds.items()
    }


@dataclass(frozen=True, kw_only=True)
class MixedTpChunk:
    """A chunk in a group whose replicas cut their layers differently."""

    owned: Mapping[int, int]
    """Rank -> parameters."""
    sums: tuple[tuple[Messages, int], ...]
    """What crosses when gradients are summed, and how often in turn."""
    gathers: tuple[tuple[Messages, int], ...]

    @classmethod
    def of(cls, units: Sequence[MixedTpUnit], replicas: Sequence[Replica]) -> "MixedTpChunk":
        """Deal out all units."""
        owned = Counter({rank: 0 for replica in replicas for rank in replica.ranks})
        sums, gathers = [], []
        for unit in units:
            blocks = tuple(unit.blocks(replicas))
            for each in blocks:
                owned[each.owner] += unit.count * each.block.numel
            sums.append((sum_messages(blocks), unit.count))
            gathers.append((gather_messages(blocks), unit.count))
        return cls(owned=owned, sums=tuple(sums), gathers=tuple(gathers))


def padded_shards(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Elements of each shard of a buffer.

    Megatron pads buffers to a multiple of the number of ranks
    (`megatron.core.optimizer.param_layout`), so that equal weights make equal shards.
    """
    if len(set(weights)) == 1:
        total = len(weights) * -(-total // len(weights))
    return tuple(stop - start for start, stop in shard_bounds(total, weights))
