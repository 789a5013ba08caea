"""What two blocks of a tensor have in common, and what is left of one without the other."""

from collections.abc import Iterator

from zorse_megatron.schedules.shards import intersection
from zorse_megatron.schedules.tensor_blocks import TensorBlock


def common_block(first: TensorBlock, second: TensorBlock) -> TensorBlock | None:
    """The elements in both blocks, or None when there are none.

    >>> common_block(TensorBlock(offset=(0,), size=(4,)), TensorBlock(offset=(3,), size=(4,)))
    TensorBlock(offset=(3,), size=(1,))
    """
    sides = []
    for axis, start in enumerate(first.offset):
        mine = start, start + first.size[axis]
        theirs = second.offset[axis], second.offset[axis] + second.size[axis]
        both = intersection(mine, theirs)
        if both is None:
            return None
        sides.append(both)
    return TensorBlock(
        offset=tuple(start for start, _ in sides),
        size=tuple(stop - start for start, stop in sides),
    )


def without(block: TensorBlock, taken: TensorBlock) -> Iterator[TensorBlock]:
    """The elements of `block` that are not in `taken`, which lies inside it, as blocks.

    >>> [(b.offset, b.size) for b in without(
    ...     TensorBlock(offset=(0, 0), size=(4, 4)), TensorBlock(offset=(1, 0), size=(3, 2)))]
    [((0, 0), (1, 4)), ((1, 2), (3, 2))]
    """
    offset, size = list(block.offset), list(block.size)
    for axis, (start, length) in enumerate(zip(taken.offset, taken.size, strict=True)):
        stop = start + length
        for first, last in ((offset[axis], start), (stop, offset[axis] + size[axis])):
            if first < last:
                rest, rest_size = list(offset), list(size)
                rest[axis], rest_size[axis] = first, last - first
                yield TensorBlock(offset=tuple(rest), size=tuple(rest_size))
        offset[axis], size[axis] = start, length
