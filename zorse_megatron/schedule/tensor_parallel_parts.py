"""What each rank of a tensor-parallel group holds of tensors and activations, and what crosses.

A TP group cuts a tensor along one axis: rows where outputs are divided (QKV by KV groups, the gate
and the up projection of SwiGLU apart, the vocabulary), columns where inputs are. A rank holds one
or several pieces of that axis, or, without an axis, all of it. Replicas of one group may cut the
same tensor differently. So the tensor is cut into *cells*, in which each replica has one holder,
and every cell is dealt out to the replicas in proportion to their shard weights: each element has
one owner, which holds it. From this one description follow the sums of gradients, the gather of
parameters, what the optimizer steps, and what a checkpoint says.

What a TP group holds whole is owned by its first rank, which is the one that Megatron counts in
norms.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from math import lcm
from typing import Literal

from zorse_megatron.plan.plan import Group, Replica, TpShards
from zorse_megatron.schedule.shards import Interval, intersection, shard_bounds

# How many units of each layer the ranks of a tensor-parallel group hold.
#
# Units are what cannot be cut: KV groups of attention, columns of the MLP, rows of the vocabulary,
# experts. A plan gives a number for each rank, or nothing, where all hold as much.


UnitKind = Literal["kv_groups", "mlp_columns", "vocabulary_rows", "experts"]


@dataclass(frozen=True, kw_only=True)
class TpPartition:
    """The parts of one TP group of `degree` ranks."""

    degree: int
    tp_shards: TpShards = field(default_factory=TpShards)

    @classmethod
    def of(cls, replica: Replica) -> "TpPartition":
        """Those of a plan's replica; equal ones that it names are as if it named none.

        Of ranks that share experts alone it is true of these only.
        """
        if replica.expert_parallel is not None:
            tp_shards = TpShards(experts=replica.expert_parallel.experts)
            return cls(degree=len(replica.ranks), tp_shards=tp_shards)
        return cls(degree=len(replica.ranks), tp_shards=replica.uneven_tp_shards or TpShards())

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold as much of everything."""
        return self.tp_shards.unequal() is None

    def units(self, kind: UnitKind) -> tuple[int, ...] | None:
        """How many of them each rank holds; None: equally many, which only the model knows."""
        units: tuple[int, ...] | None = getattr(self.tp_shards, kind)
        return units

    def proportions(self, kind: UnitKind) -> tuple[int, ...]:
        """How much each rank holds beside the others, in any unit."""
        return self.units(kind) or (1,) * self.degree

    def has_any(self, kind: UnitKind, index: int) -> bool:
        """Whether rank `index` holds any of them."""
        return self.proportions(kind)[index] > 0

    def interval(self, kind: UnitKind, index: int, length: int) -> Interval:
        """What rank `index` holds of an axis of `length` elements.

        >>> TpPartition(degree=2, tp_shards=TpShards(kv_groups=(3, 1))).interval("kv_groups", 1, 80)
        (60, 80)
        """
        ends = (0, *accumulate(self.proportions(kind)))
        total = ends[-1]
        return length * ends[index] // total, length * ends[index + 1] // total

    def experts_of(self, index: int) -> range:
        """The experts that rank `index` holds, which are whole; of a group that names them."""
        counts = self.proportions("experts")
        return range(sum(counts[:index]), sum(counts[: index + 1]))

    def whole_length(self, kind: UnitKind, index: int, length: int) -> int:
        """Elements of an axis of which rank `index` holds `length`, which are not none."""
        proportions = self.proportions(kind)
        return length * sum(proportions) // proportions[index]


def has_uneven_tp_shards(group: Group) -> bool:
    """Whether ranks of a TP group of the group hold other parts than each other."""
    return any(not TpPartition.of(replica).are_equal for replica in group.replicas)


# A flat interval of a tensor as axis-aligned blocks, which is what a checkpoint can describe.


@dataclass(frozen=True, kw_only=True)
class TensorBlock:
    """A block of a tensor: `offset` and `size` have one entry per axis, in elements."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)


def interval_blocks(shape: Sequence[int], interval: Interval) -> tuple[TensorBlock, ...]:
    """Cut elements [start, stop) of a row-major tensor of `shape` into blocks.

    The blocks come in flat order and each is contiguous in memory, so block after block takes the
    next `numel` elements of the interval. At most 2 * ndim - 1 blocks: for a matrix the rest of the
    first row, the full rows, and the start of the last row.

    >>> [(block.offset, block.size) for block in interval_blocks((4, 10), (7, 32))]
    [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 2))]

    Raises ValueError when the interval is not inside the tensor.
    """
    start, stop = interval
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"found interval {interval}; expected it inside a tensor of {shape}")
    if start == stop:
        return ()
    return tuple(_blocks(tuple(shape), start, stop))


def _blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBlock]:
    if len(shape) <= 1:
        yield TensorBlock(offset=(start,) * len(shape), size=(stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, in_first = divmod(start, row)
    last, in_last = divmod(stop, row)
    if first == last:
        yield from _in_row(shape, first, in_first, in_last)
        return
    if in_first:
        yield from _in_row(shape, first, in_first, row)
        first += 1
    if first < last:
        yield TensorBlock(
            offset=(first,) + (0,) * (len(shape) - 1), size=(last - first, *shape[1:])
        )
    if in_last:
        yield from _in_row(shape, last, 0, in_last)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[TensorBlock]:
    for block in _blocks(shape[1:], start, stop):
        yield TensorBlock(offset=(row, *block.offset), size=(1, *block.size))


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
    shape: Sequence[int],
    axis: int,
    tp_shards: TpPartition,
    kind: UnitKind,
    *,
    index: int,
    blocks: int,
) -> TensorPart:
    """What rank `index` of a TP group holds if each of `blocks` of the axis is cut in the same
    way."""
    if tp_shards.degree == 1:
        return TensorPart(shape=tuple(shape), axis=None)
    length = shape[axis] // blocks
    start, stop = tp_shards.interval(kind, index, length)
    firsts = range(0, shape[axis], length) if start < stop else ()
    return TensorPart(
        shape=tuple(shape),
        axis=axis,
        pieces=tuple((first + start, first + stop) for first in firsts),
    )


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
"""For each replica: rank -> what it holds, the TP group's first rank first."""


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


# Which elements cross in sums and gathers among ranks that hold different parts of a tensor.
#
# What `runtime.mixed_tp_exchange` does, in numbers: each owner gets what it owns of the gradients
# from one rank of every other replica, and each holder gets the new parameters from their owners.


Messages = Counter[tuple[int, int]]
"""(source, target) -> elements that cross; ranks, never the same one."""


def sum_messages(blocks: Iterable[OwnedBlock]) -> Messages:
    """Of gradients, to their owners."""
    return _added(
        ((source, each.owner), each.block.numel)
        for each in blocks
        for source in each.contributors
        if source != each.owner
    )


def gather_messages(blocks: Iterable[OwnedBlock]) -> Messages:
    """Of parameters, from their owners."""
    return _added(
        ((each.owner, target), each.block.numel)
        for each in blocks
        for target in each.holders
        if target != each.owner
    )


def _added(entries: Iterable[tuple[tuple[int, int], int]]) -> Messages:
    found = Messages()
    for pair, elements in entries:
        found[pair] += elements
    return found


# How an activation is cut between tensor-parallel groups: along the sequence, a slice per rank.
#
# Rank i of a TP group of d has or sends the i-th of d equal slices of a micro-batch's positions,
# with sequence parallelism and without. Between two TP groups the messages are the overlaps of
# their slices, so each element crosses once, whatever the two degrees. Without sequence parallelism
# every rank of the receiving TP group needs the whole: the TP group gathers it inside itself.
#
# Slices are fractions of the sequence, as lists of actions do not depend on its length.


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSlice:
    """Positions from start / of to stop / of of a sequence."""

    start: int
    stop: int
    of: int

    def bounds(self, length: int) -> tuple[int, int]:
        """The half-open interval of positions in a sequence of `length` tokens.

        >>> SequenceSlice(start=1, stop=2, of=3).bounds(8)
        (2, 5)
        """
        return length * self.start // self.of, length * self.stop // self.of

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}/{self.of}"


def slice_of_rank(index: int, degree: int) -> SequenceSlice:
    """What the rank at `index` of a TP group of `degree` ranks has or sends."""
    return SequenceSlice(start=index, stop=index + 1, of=degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePair:
    """What one rank of a TP group sends to one rank of another TP group."""

    source: int
    """Index in the sending TP group."""
    target: int
    positions: SequenceSlice | None
    """None: the whole sequence."""


@cache
def slice_pairs(sources: int, targets: int) -> tuple[SlicePair, ...]:
    """The messages between TP groups of `sources` and `targets` ranks, in the order of positions.

    >>> [(p.source, p.target, str(p.positions)) for p in slice_pairs(2, 3)]
    [(0, 0, '0:1/3'), (0, 1, '2:3/6'), (1, 1, '3:4/6'), (1, 2, '2:3/3')]
    """
    if sources == targets == 1:
        return (SlicePair(source=0, target=0, positions=None),)
    unit = lcm(sources, targets)
    edges = sorted({*range(0, unit + 1, unit // sources), *range(0, unit + 1, unit // targets)})
    return tuple(
        SlicePair(
            source=start * sources // unit,
            target=start * targets // unit,
            positions=_reduced(start, stop, unit),
        )
        for start, stop in pairwise(edges)
    )


def _reduced(start: int, stop: int, unit: int) -> SequenceSlice:
    of = lcm(Fraction(start, unit).denominator, Fraction(stop, unit).denominator)
    return SequenceSlice(start=start * of // unit, stop=stop * of // unit, of=of)
