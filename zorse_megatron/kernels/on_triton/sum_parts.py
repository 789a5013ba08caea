"""`kernels.sum_parts` in Triton."""

import torch
import triton
import triton.language as tl

from zorse_megatron.kernels.on_triton.blocks import (
    BLOCK,
    NUM_WARPS,
    elements_of,
    grid_for,
    launches,
)

MAX_PARTS = 16
"""Parts of one launch, which the compiler unrolls. Further launches add, in the same order."""


@triton.jit
def sum_parts_kernel(out, parts, weights, numel, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = elements_of(tl.program_id(0), BLOCK)
    inside = at < numel
    if ADD:
        total = tl.load(out + at, mask=inside, other=0.0)
    else:
        total = tl.load(parts[0] + at, mask=inside, other=0.0).to(tl.float32) * weights[0]
    for k in tl.static_range(0 if ADD else 1, len(parts)):
        part = tl.load(parts[k] + at, mask=inside, other=0.0).to(tl.float32)
        total = total + part * weights[k]
    tl.store(out + at, total, mask=inside)


def sum_parts(
    out: torch.Tensor, parts: tuple[torch.Tensor, ...], weights: tuple[float, ...], add: bool
) -> None:
    """As `sum_parts_torch`."""
    if not parts and not add:
        out.zero_()
    # What the first launch overwrites must not be read by a later one.
    late = parts[MAX_PARTS:]
    late = tuple(part.clone() if part.data_ptr() == out.data_ptr() else part for part in late)
    parts = parts[:MAX_PARTS] + late
    with torch.cuda.device_of(out):
        for here in launches(out.numel()):
            _launch(out[here], [part[here] for part in parts], weights, add)


def _launch(
    out: torch.Tensor, parts: list[torch.Tensor], weights: tuple[float, ...], add: bool
) -> None:
    for first in range(0, len(parts), MAX_PARTS):
        some = slice(first, first + MAX_PARTS)
        sum_parts_kernel[grid_for(out.numel())](
            out,
            tuple(parts[some]),
            weights[some],
            out.numel(),
            ADD=add or first > 0,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
