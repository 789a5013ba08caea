"""The grouped products in Triton. Each function takes what its plain torch version takes.

One launch serves all experts of a rank, and the host never learns how many tokens each has: it
launches as many tiles as there can be, and the surplus ends at once. Where a weight or a gradient
lies, programs read from a table of addresses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from zorse_megatron.kernels.grouped_gemm import output_rows

ALIGNED_BYTES = 16
"""What one instruction loads at most, from a multiple of itself."""
GROUP = tl.constexpr(8)
"""Tiles below one another that follow each other: they share columns, which the L2 cache keeps."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The size of a program's output tile, and how it computes it."""

    rows: int
    columns: int
    depth: int
    """Terms of each sum that are loaded at a time."""
    num_warps: int
    num_stages: int
    """Loads under way, each with shared memory of its own."""


SMALL_MEMORY = Blocks(rows=128, columns=128, depth=32, num_warps=4, num_stages=3)
"""48 KiB of 16-bit numbers: GPUs with 100 KiB per multiprocessor hold two programs."""
LARGE_MEMORY = Blocks(rows=128, columns=256, depth=64, num_warps=8, num_stages=3)
"""144 KiB of 16-bit numbers, of 163 KiB on A100 and 227 KiB on H100 and B200."""
FEW_ROWS = Blocks(rows=64, columns=128, depth=64, num_warps=4, num_stages=3)
"""Where experts have fewer tokens than a tile of 128 rows can use: 72 KiB."""
FP32 = Blocks(rows=128, columns=64, depth=16, num_warps=4, num_stages=3)
"""Number by number, as tensor cores would round the factors to TF32; registers limit the tile."""


def blocks_for(capability: int, dtype: torch.dtype, rows_each: int) -> Blocks:
    """The choice for a compute capability (8.6: 86) and for the rows that an expert has on average.

    The tests compile each for the GPUs it is for: all fits shared memory, and nothing spills where
    widths are multiples of 16 and gradients are added in fp32.
    """
    if dtype is torch.float32:
        return FP32
    if rows_each < 128:
        return FEW_ROWS
    return LARGE_MEMORY if capability in {80, 90, 100, 103} else SMALL_MEMORY


@triton.jit
def tile_of(number, num_rows, num_columns, GROUP: tl.constexpr):
    """Row and column of a tile: down `GROUP` rows, then on to the next column."""
    first = number // (GROUP * num_columns) * GROUP
    height = min(num_rows - first, GROUP)
    within = number % (GROUP * num_columns)
    return first + within % height, within // height


@triton.jit
def address_of(table, expert, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer that a table holds for an expert."""
    address = tl.load(table + expert).to(tl.pointer_type(dtype))
    return tl.multiple_of(address, 16) if ALIGNED else address


@triton.jit
def rows_before(counts, expert, num_experts, UP_TO: tl.constexpr):
    """Rows of all experts before one."""
    others = tl.arange(0, UP_TO)
    before = others < tl.minimum(expert, num_experts)
    return tl.sum(tl.load(counts + others, mask=before, other=0))


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def grouped_tiles_kernel(
    counts,
    tiles,
    num_rows,
    num_tiles,
    num_experts,
    ROWS: tl.constexpr,
    UP_TO: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Program e lists the tiles of expert e in `tiles` [num_tiles, 3] (int64): expert, first row,
    end of its rows. A last program marks the surplus with expert -1."""
    expert = tl.program_id(0)
    others = tl.arange(0, UP_TO)
    before = others < expert
    rows = tl.load(counts + others, mask=before, other=0)
    start = tl.sum(rows)
    first = tl.sum((rows + ROWS - 1) // ROWS)
    is_expert = expert < num_experts
    count = tl.load(counts + expert, mask=is_expert, other=0)
    # Counts that add up to more than there is must not lead outside of it.
    end = tl.minimum(start + count, num_rows)
    stop = tl.where(is_expert, first + (count + ROWS - 1) // ROWS, num_tiles)
    stop = tl.minimum(stop, num_tiles)
    for done in range(first, stop, AT_ONCE):
        tile = done + tl.arange(0, AT_ONCE)
        inside = tile < stop
        tl.store(tiles + 3 * tile, tl.where(is_expert, expert, -1), mask=inside)
        tl.store(tiles + 3 * tile + 1, start + (tile - first) * ROWS, mask=inside)
        tl.store(tiles + 3 * tile + 2, end, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def grouped_rows_kernel(
    x,
    y,
    weights,
    tiles,
    num_tiles,
    depth,
    width,
    stride_depth,
    stride_width,
    ALIGNED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y [T, width] = x [T, depth] times each row's expert's matrix, of these strides."""
    tile, column = tile_of(tl.program_id(0), num_tiles, tl.cdiv(width, COLUMNS), GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    first = tl.load(tiles + 3 * tile + 1)
    rows = tl.arange(0, ROWS)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)
    terms = tl.arange(0, DEPTH)
    here = (rows < tl.load(tiles + 3 * tile + 2) - first)[:, None]
    there = (columns < width)[None, :]
    weight = address_of(weights, expert, x.dtype.element_ty, ALIGNED)
    left = x + first * depth + rows[:, None] * depth + terms[None, :]
    right = weight + terms[:, None] * stride_depth + columns[None, :] * stride_width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for done in range(0, depth, DEPTH):
        if EVEN:
            a, b = tl.load(left, mask=here, other=0.0), tl.load(right, mask=there, other=0.0)
        else:
            inside = terms < depth - done
            a = tl.load(left, mask=here & inside[None, :], other=0.0)
            b = tl.load(right, mask=there & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH * stride_depth
    out = y + first * width + rows[:, None] * width + columns[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=here & there)


@triton.jit(do_not_specialize=["num_rows"])
def grouped_weights_kernel(
    x,
    dy,
    counts,
    gradients,
    num_rows,
    num_experts,
    height,
    width,
    dtype: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UP_TO: tl.constexpr,
):
    """A tile of one expert's gradient [height, width]: its dy^T x, summed in the order of rows."""
    down, across = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    row, column = tile_of(tl.program_id(0) % (down * across), down, across, GROUP)
    start = rows_before(counts, expert, num_experts, UP_TO)
    count = tl.minimum(tl.load(counts + expert), num_rows - start).to(tl.int32)
    if count < (1 if ADD else 0):
        return
    rows, columns = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    terms = tl.arange(0, DEPTH)
    here, there = (rows < height)[None, :], (columns < width)[None, :]
    left = dy + start * height + terms[:, None] * height + rows[None, :]
    right = x + start * width + terms[:, None] * width + columns[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for done in range(0, count, DEPTH):
        inside = (terms < count - done)[:, None]
        a = tl.load(left, mask=inside & here, other=0.0)
        b = tl.load(right, mask=inside & there, other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        left += DEPTH * height
        right += DEPTH * width
    place = address_of(gradients, expert, dtype, ALIGNED)
    # In quarters: with the old values of all of it beside the new ones, threads would spill.
    halves = tl.split(total.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))
    for half in tl.static_range(2):
        quarters = tl.split(halves[half].reshape(ROWS, 2, COLUMNS // 4).permute(0, 2, 1))
        for quarter in tl.static_range(2):
            first = column * COLUMNS + (2 * half + quarter) * (COLUMNS // 4)
            columns = first + tl.arange(0, COLUMNS // 4)
            out = place + rows[:, None] * width + columns[None, :]
            mask = (rows < height)[:, None] & (columns < width)[None, :]
            value = quarters[quarter]
            if ADD:
                value += tl.load(out, mask=mask, other=0.0).to(tl.float32)
            tl.store(out, value.to(dtype), mask=mask)


def grouped_rows(
    x: torch.Tensor,
    counts: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    transposed: bool,
    has_rest: bool = False,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """As `grouped_rows_torch`."""
    (height, width), num_experts = weights[0].shape, len(weights)
    depth, out_width = (width, height) if transposed else (height, width)
    y = output_rows(x, out_width, has_rest=has_rest)
    if not y.numel():
        return y
    with torch.cuda.device_of(x):
        blocks = blocks or _blocks(x, num_experts)
        num_tiles = triton.cdiv(x.shape[0], blocks.rows) + num_experts
        tiles = torch.empty(num_tiles, 3, dtype=torch.int64, device=x.device)
        grouped_tiles_kernel[(num_experts + 1,)](
            counts,
            tiles,
            x.shape[0],
            num_tiles,
            num_experts,
            ROWS=blocks.rows,
            UP_TO=triton.next_power_of_2(num_experts),
            AT_ONCE=32,
            num_warps=1,
        )
        table, aligned = _table(weights)
        grouped_rows_kernel[(num_tiles * triton.cdiv(out_width, blocks.columns),)](
            x,
            y,
            table,
            tiles,
            num_tiles,
            depth,
            out_width,
            *((1, width) if transposed else (width, 1)),
            ALIGNED=aligned,
            EVEN=depth % blocks.depth == 0,
            **_constants(blocks),
        )
    return y


def grouped_weights(
    x: torch.Tensor,
    dy: torch.Tensor,
    counts: torch.Tensor,
    out: Sequence[torch.Tensor],
    *,
    add: bool,
    blocks: Blocks | None = None,
) -> None:
    """As `grouped_weights_torch`."""
    num_experts, (height, width) = len(out), out[0].shape
    with torch.cuda.device_of(x):
        blocks = blocks or _blocks(x, num_experts)
        table, aligned = _table(out)
        tiles = triton.cdiv(height, blocks.rows) * triton.cdiv(width, blocks.columns)
        grouped_weights_kernel[(num_experts * tiles,)](
            x,
            dy,
            counts,
            table,
            x.shape[0],
            num_experts,
            height,
            width,
            dtype=_TYPES[out[0].dtype],
            ADD=add,
            ALIGNED=aligned,
            UP_TO=triton.next_power_of_2(num_experts),
            **_constants(blocks),
        )


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _constants(blocks: Blocks) -> dict[str, Any]:
    return {
        "GROUP": GROUP,
        "ROWS": blocks.rows,
        "COLUMNS": blocks.columns,
        "DEPTH": blocks.depth,
        "num_warps": blocks.num_warps,
        "num_stages": blocks.num_stages,
    }


def _blocks(x: torch.Tensor, num_experts: int) -> Blocks:
    if x.device.type == "cpu":  # the interpreter
        return FP32
    capability = triton.runtime.driver.active.get_current_target().arch
    return blocks_for(capability, x.dtype, x.shape[0] // num_experts)


def _table(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The addresses of tensors, [E] int64 on their device; whether all are multiples of 16."""
    device = tensors[0].device
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else None
    return _table_of(tuple(tensor.data_ptr() for tensor in tensors), device, stream)


@lru_cache(maxsize=4096)
def _table_of(
    addresses: tuple[int, ...], device: torch.device, stream: int | None
) -> tuple[torch.Tensor, bool]:
    """Parameters seldom move, so a table is copied once. Each stream has its own, as the copy is
    ordered before the work of one stream only."""
    table = torch.tensor(addresses, dtype=torch.int64)
    if stream is not None:
        table = table.pin_memory()  # else the host would wait for the copy
    aligned = not any(address % ALIGNED_BYTES for address in addresses)
    return table.to(device, non_blocking=True), aligned


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel for kernel in (grouped_rows, grouped_weights)
}
