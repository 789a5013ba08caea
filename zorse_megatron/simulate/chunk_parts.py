"""What each rank of a group holds and owns of a chunk's parameters, whatever sets the group has.

Where all replicas have sets of one degree, ranks with the same part cut what they hold into shards,
as a group of single ranks does. Where degrees differ, what is owned and what is sent follows from
overlaps (`schedules.tensor_parts`). There a layer counts as two tensors: all that sets cut, in one,
and all that each rank has whole; so shards are off the runtime's by its rounding to 64 elements of
each tensor.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.schedules.part_messages import Messages, gather_messages, sum_messages
from zorse_megatron.schedules.shards import shard_bounds
from zorse_megatron.schedules.tensor_parts import OwnedBlock, equal_part, owned_blocks

Sets = Sequence[tuple[int, ...]]
"""The ranks of each replica of a group."""


@dataclass(frozen=True, kw_only=True)
class PartedUnit:
    """Parameters that unlike replicas exchange at once, such as a layer, and how many like it."""

    cut: int
    """Elements of which each rank of a set has a part."""
    whole: int
    """Elements that each rank has."""
    count: int = 1

    @classmethod
    def of(cls, whole_parameters: int, of_rank: int, degree: int, count: int = 1) -> "PartedUnit":
        """From what a rank of `degree` has of `whole_parameters`."""
        whole = (degree * of_rank - whole_parameters) // (degree - 1)
        return cls(cut=whole_parameters - whole, whole=whole, count=count)

    def blocks(self, sets: Sets, weights: Sequence[float]) -> Iterator[OwnedBlock]:
        """Who owns what of one of them."""
        for elements, axis in ((self.cut, 0), (self.whole, None)):
            if elements:
                yield from owned_blocks(
                    [
                        {
                            rank: equal_part((elements,), axis, index=index, degree=len(ranks))
                            for index, rank in enumerate(ranks)
                        }
                        for ranks in sets
                    ],
                    weights,
                )


@dataclass(frozen=True, kw_only=True)
class PartedChunk:
    """A chunk in a group whose replicas cut their layers differently."""

    owned: Mapping[int, int]
    """Rank -> parameters."""
    sums: tuple[tuple[Messages, int], ...]
    """What crosses when gradients are summed, and how often in turn."""
    gathers: tuple[tuple[Messages, int], ...]

    @classmethod
    def of(cls, units: Sequence[PartedUnit], sets: Sets, weights: Sequence[float]) -> "PartedChunk":
        """Deal out all units."""
        owned: Counter[int] = Counter({rank: 0 for ranks in sets for rank in ranks})
        sums, gathers = [], []
        for unit in units:
            blocks = tuple(unit.blocks(sets, weights))
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


@dataclass(frozen=True, kw_only=True)
class OwnedInterval:
    """Elements of a tensor, as if it were flat, that one rank owns."""

    rank: int
    start: int
    stop: int


def owned_intervals(total: int, sets: Sets, weights: Sequence[float]) -> list[OwnedInterval]:
    """Of a tensor that sets cut by rows, in order."""
    return [
        OwnedInterval(
            rank=each.owner,
            start=each.block.offset[0],
            stop=each.block.offset[0] + each.block.size[0],
        )
        for each in PartedUnit(cut=total, whole=0).blocks(sets, weights)
    ]
