"""`kernels.pack` in Triton."""

from collections.abc import Iterator
from functools import lru_cache

import torch
import triton
import triton.language as tl

from zorse_megatron.kernels.on_triton.blocks import BLOCK, NUM_WARPS, rounded_to
from zorse_megatron.schedules.shards import Interval

ALIGN = tl.constexpr(8)
"""Elements: 16 bytes of 16-bit numbers, the widest access there is."""


@triton.jit
def pack_kernel(
    packed,
    whole,
    blocks,
    IS_ALIGNED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`blocks`: int64 [blocks, 3]: where each is in the packed buffer, in the whole, its size."""
    row = blocks + tl.program_id(0).to(tl.int64) * 3
    packed_start = tl.load(row)
    whole_start = tl.load(row + 1)
    size = tl.load(row + 2)
    if IS_ALIGNED:  # the compiler cannot know; without it each element is an access of its own
        packed_start = tl.multiple_of(packed_start, ALIGN)
        whole_start = tl.multiple_of(whole_start, ALIGN)
        size = tl.multiple_of(size, ALIGN)
    index = tl.arange(0, BLOCK)
    inside = index < size
    values = tl.load(whole + whole_start + index, mask=inside, other=0.0)
    if whole.dtype.element_ty != packed.dtype.element_ty:
        values = rounded_to(values.to(tl.float32), packed.dtype.element_ty)
    tl.store(packed + packed_start + index, values, mask=inside)


def pack(packed: torch.Tensor, whole: torch.Tensor, pieces: tuple[Interval, ...]) -> None:
    """As `pack_torch`."""
    with torch.cuda.device_of(packed):
        for blocks, is_aligned in block_tables(pieces, packed.device):
            pack_kernel[(len(blocks),)](
                packed,
                whole,
                blocks,
                IS_ALIGNED=is_aligned,
                ALIGN=ALIGN,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )


@lru_cache(maxsize=256)
def block_tables(
    pieces: tuple[Interval, ...], device: torch.device
) -> tuple[tuple[torch.Tensor, bool], ...]:
    """Cut the pieces into blocks; one table of those that are aligned in both buffers, one of the
    rest (ends of pieces, and pieces that are shifted by an odd number of elements).

    Kept, because they are the same in every step; 24 bytes per block of 2048 elements.
    """
    tables = []
    for wanted in (True, False):
        runs = [run for run, is_aligned in _runs(pieces) if is_aligned is wanted]
        if runs:
            rows = torch.cat([_blocks_of(*run) for run in runs])
            tables.append((rows.to(device), wanted))
    return tuple(tables)


def _runs(pieces: tuple[Interval, ...]) -> Iterator[tuple[tuple[int, int, int], bool]]:
    """Runs (packed start, whole start, size) that make up the pieces, and whether aligned."""
    align = ALIGN.value
    packed = 0
    for start, stop in pieces:
        size = stop - start
        head = min(-start % align, size) if (start - packed) % align == 0 else size
        body = (size - head) // align * align
        for at, length, is_aligned in (
            (0, head, False),
            (head, body, True),
            (head + body, size - head - body, False),
        ):
            if length:
                yield (packed + at, start + at, length), is_aligned
        packed += size


def _blocks_of(packed_start: int, whole_start: int, size: int) -> torch.Tensor:
    """Blocks of a run: int64 [blocks, 3]."""
    at = torch.arange(0, size, BLOCK.value, dtype=torch.int64)
    return torch.stack([packed_start + at, whole_start + at, (size - at).clamp(max=BLOCK.value)], 1)
