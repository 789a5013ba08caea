"""What each rank of a tensor-parallel set holds of a tensor, and who owns which part of it.

A set cuts a tensor along one axis: rows where outputs are divided (QKV by KV groups, the gate and
the up projection of SwiGLU apart, the vocabulary), columns where inputs are. A rank holds one or
several pieces of that axis, or, without an axis, all of it. Replicas of one group may cut the same
tensor differently. So the tensor is cut into *cells*, in which each replica has one holder, and
every cell is dealt out to the replicas in proportion to their shard weights: each element has one
owner, which holds it. From this one description follow the sums of gradients, the gather of
parameters, what the optimizer steps, and what a checkpoint says.

What a set holds whole is owned by its first rank, which is the one that Megatron counts in norms.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorse_megatron.schedules.set_parts import SetParts, UnitKind
from zorse_megatron.schedules.shards import Interval, intersection, shard_bounds
from zorse_megatron.schedules.tensor_blocks import TensorBlock, interval_blocks


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """What one rank holds of a tensor of `shape`."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    axis: int | None
    """The one that is cut; None: the rank holds the whole."""
    pieces: tuple[Interval, ...] = ()
    """Of the axis, in the order in which the rank has them; disjoint and not empty."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of what the rank holds."""
        if self.axis is None:
            return self.shape
        length = sum(stop - start for start, stop in self.pieces)
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    def local(self, block: TensorBlock) -> TensorBlock:
        """A block of the whole tensor, inside one piece, as a block of what the rank holds.

        Raises ValueError for a block that the rank does not hold in one piece.
        """
        if self.axis is None:
            return block
        first, position = block.offset[self.axis], 0
        for start, stop in self.pieces:
            if start <= first and first + block.size[self.axis] <= stop:
                offset = list(block.offset)
                offset[self.axis] = position + first - start
                return TensorBlock(offset=tuple(offset), size=block.size)
            position += stop - start
        raise ValueError(f"found {block}; expected it inside one of {self.pieces}")


def cut_part(
    shape: Sequence[int], axis: int, parts: SetParts, kind: UnitKind, *, index: int, blocks: int
) -> TensorPart:
    """What rank `index` of a set holds if each of `blocks` of the axis is cut in the same way."""
    if parts.degree == 1:
        return TensorPart(shape=tuple(shape), axis=None)
    length = shape[axis] // blocks
    start, stop = parts.interval(kind, index, length)
    firsts = range(0, shape[axis], length) if start < stop else ()
    return TensorPart(
        shape=tuple(shape),
        axis=axis,
        pieces=tuple((first + start, first + stop) for first in firsts),
    )


def equal_part(
    shape: Sequence[int], axis: int | None, *, index: int, degree: int, blocks: int = 1
) -> TensorPart:
    """What rank `index` of `degree` ranks holds if each of `blocks` of the axis is cut equally.

    >>> equal_part((8, 3), 0, index=1, degree=2, blocks=2).pieces
    ((2, 4), (6, 8))
    """
    if axis is None:
        return TensorPart(shape=tuple(shape), axis=None)
    parts = SetParts(degree=degree)
    return cut_part(shape, axis, parts, "mlp_columns", index=index, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class OwnedBlock:
    """A block of the whole tensor that one rank owns."""

    block: TensorBlock
    owner: int
    """A rank, as are all below."""
    contributors: tuple[int, ...]
    """One rank of each replica, the owner among them: the sum of theirs is the gradient."""
    holders: tuple[int, ...]
    """All that have a copy, the owner among them."""


Replicas = Sequence[Mapping[int, TensorPart]]
"""For each replica: rank -> what it holds, the set's first rank first."""


def owned_blocks(replicas: Replicas, weights: Sequence[float]) -> tuple[OwnedBlock, ...]:
    """Deal a tensor out to its owners, in proportion to the replicas' `weights`.

    All ranks of the group compute the same list; its order is that of messages.
    """
    first = next(iter(replicas[0].values()))
    axes = {part.axis for replica in replicas for part in replica.values() if part.axis is not None}
    if not axes:
        holders = [next(iter(replica)) for replica in replicas]
        everyone = tuple(rank for replica in replicas for rank in replica)
        return tuple(
            _dealt(
                TensorBlock(offset=(0,) * len(first.shape), size=first.shape),
                holders,
                everyone,
                weights,
            )
        )
    (axis,) = axes
    found: list[OwnedBlock] = []
    for start, stop in _cells(first.shape[axis], replicas):
        holding = [_holder(replica, start) for replica in replicas]
        offset, size = [0] * len(first.shape), list(first.shape)
        offset[axis], size[axis] = start, stop - start
        cell = TensorBlock(offset=tuple(offset), size=tuple(size))
        # A replica of one rank holds the whole, and no other rank of it does.
        found += _dealt(cell, holding, tuple(holding), weights)
    return tuple(found)


def _cells(length: int, replicas: Replicas) -> Iterable[Interval]:
    """The axis, cut wherever any rank's piece begins or ends."""
    edges = {0, length}
    for replica in replicas:
        for part in replica.values():
            edges.update(edge for piece in part.pieces for edge in piece)
    ordered = sorted(edges)
    return pairwise(ordered)


def _holder(replica: Mapping[int, TensorPart], position: int) -> int:
    """The rank that has this position of the axis."""
    for rank, part in replica.items():
        if part.axis is None or any(start <= position < stop for start, stop in part.pieces):
            return rank
    raise ValueError(f"found no rank of {list(replica)} with position {position}; expected one")


def _dealt(
    cell: TensorBlock, holding: Sequence[int], everyone: tuple[int, ...], weights: Sequence[float]
) -> Iterable[OwnedBlock]:
    for owner, interval in zip(holding, shard_bounds(cell.numel, weights), strict=True):
        for block in interval_blocks(cell.size, interval):
            offset = tuple(map(sum, zip(cell.offset, block.offset, strict=True)))
            yield OwnedBlock(
                block=TensorBlock(offset=offset, size=block.size),
                owner=owner,
                contributors=tuple(holding),
                holders=everyone,
            )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive elements of the flattened whole tensor, where an owner has them in one piece."""

    start: int
    stop: int
    at: int
    """Where they begin in what the owner has."""


def whole_blocks_of(part: TensorPart, interval: Interval) -> Iterable[TensorBlock]:
    """Elements `interval` of the flattened part as blocks of the whole tensor, in their order."""
    for block in interval_blocks(part.local_shape, interval):
        if part.axis is None:
            yield block
            continue
        position, axis = 0, part.axis
        first = block.offset[axis]
        for start, stop in part.pieces:
            both = intersection(
                (first, first + block.size[axis]), (position, position + stop - start)
            )
            if both is not None:
                # Rows of several pieces follow one another; of columns there is one piece.
                offset, size = list(block.offset), list(block.size)
                offset[axis], size[axis] = start + both[0] - position, both[1] - both[0]
                yield TensorBlock(offset=tuple(offset), size=tuple(size))
            position += stop - start


def runs_of(block: TensorBlock, shape: Sequence[int], at: int) -> Iterable[Run]:
    """The elements of a block as runs of the flattened tensor; the block begins at `at`.

    >>> list(runs_of(TensorBlock(offset=(1, 2), size=(2, 2)), (4, 10), 0))
    [Run(start=12, stop=14, at=0), Run(start=22, stop=24, at=2)]
    """
    lead = len(shape) - 1
    while lead > 0 and block.size[lead] == shape[lead]:
        lead -= 1
    row, length = math.prod(shape[lead + 1 :]), math.prod(block.size[lead:])
    for number in range(math.prod(block.size[:lead])):
        place, rest = 0, number
        for axis in reversed(range(lead)):
            rest, index = divmod(rest, block.size[axis])
            place += (block.offset[axis] + index) * math.prod(shape[axis + 1 :])
        start = place + block.offset[lead] * row
        yield Run(start=start, stop=start + length, at=at + number * length)


def runs_of_rows(part: TensorPart, interval: Interval) -> Iterable[Run]:
    """Elements `interval` of a flattened part that is cut by rows, or not at all.

    >>> part = TensorPart(shape=(8, 10), axis=0, pieces=((4, 6),))
    >>> list(runs_of_rows(part, (5, 15)))
    [Run(start=45, stop=55, at=5)]
    """
    assert part.axis in (None, 0), "rows are in one piece of memory, columns are not"
    row = math.prod(part.shape[1:])
    pieces = ((0, part.shape[0]),) if part.axis is None else part.pieces
    position = 0
    for first, last in pieces:
        size = (last - first) * row
        both = intersection(interval, (position, position + size))
        if both is not None:
            start = first * row + both[0] - position
            yield Run(start=start, stop=start + both[1] - both[0], at=both[0])
        position += size
