"""A flat interval of a tensor as axis-aligned blocks, which is what a checkpoint can describe."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.schedules.shards import Interval


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
