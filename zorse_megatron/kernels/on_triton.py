"""The kernels in Triton, by name. Each takes what its plain torch version takes.

With `TRITON_INTERPRET=1` they run on CPU tensors too: so are they tested.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from zorse_megatron.kernels.kernels import AdamW

# What the kernels share: which elements a launch and its programs work on, and rounding.


BLOCK = tl.constexpr(2048)
NUM_WARPS = 8
"""With 2048 elements a thread has 8: one load of 16 bytes for 16-bit numbers, two for fp32."""


def launches(numel: int) -> Iterator[slice]:
    """Cut `numel` elements into a multiple of 16 and the rest, neither of them empty.

    Triton reads 16 bytes at a time only where it knows that none of them lies beyond the end, which
    it concludes from a number of elements that is a multiple of 16.
    """
    rest = numel // 16 * 16
    return (here for here in (slice(0, rest), slice(rest, numel)) if here.start < here.stop)


def grid_for(numel: int) -> tuple[int]:
    """One program per block."""
    return (triton.cdiv(numel, BLOCK.value),)


@triton.jit
def elements_of(block, BLOCK: tl.constexpr):
    """Positions of a block's elements, in 64 bits: 2^31 elements of fp32 are but 8 GiB."""
    return block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def rounded_to(values, dtype: tl.constexpr):
    """fp32 `values` as `dtype`, to nearest even.

    Triton's interpreter cuts bf16 off where processors round, hence the bits: half a unit in the
    last kept place is added, less one where the tie would go to an odd number. NaN stays NaN.
    """
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        kept = bits >> 16
        near = (bits + 0x7FFF + (kept & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        result = tl.where(is_nan, kept | 0x40, near).to(tl.uint16)
        return result.to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)


# `adamw_shard` in Triton.


@triton.jit
def adamw_shard_kernel(
    main_at,
    exp_avg_at,
    exp_avg_sq_at,
    grad_at,
    copy_at,
    inv_scale_at,
    clip_at,
    numel,
    kept,
    added,
    new1,
    beta2,
    new2,
    root_of_bias2,
    eps,
    step_size,
    IS_ADDED: tl.constexpr,
    IS_MOSTLY_NEW: tl.constexpr,
    HAS_COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = elements_of(tl.program_id(0), BLOCK)
    inside = at < numel
    main = tl.load(main_at + at, mask=inside, other=0.0)
    exp_avg = tl.load(exp_avg_at + at, mask=inside, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_at + at, mask=inside, other=0.0)
    grad = tl.load(grad_at + at, mask=inside, other=0.0).to(tl.float32)

    grad = grad * tl.load(inv_scale_at) * tl.load(clip_at)
    if IS_ADDED:
        grad = grad + main * added
    main = main * kept
    # As torch's lerp: from the end that is nearer, for the result's accuracy.
    difference = grad - exp_avg
    exp_avg = grad - difference * (1.0 - new1) if IS_MOSTLY_NEW else exp_avg + difference * new1
    exp_avg_sq = exp_avg_sq * beta2 + new2 * grad * grad
    divisor = tl.div_rn(tl.sqrt_rn(exp_avg_sq), root_of_bias2) + eps
    main = main - tl.div_rn(step_size * exp_avg, divisor)

    tl.store(main_at + at, main, mask=inside)
    tl.store(exp_avg_at + at, exp_avg, mask=inside)
    tl.store(exp_avg_sq_at + at, exp_avg_sq, mask=inside)
    if HAS_COPY:
        tl.store(copy_at + at, rounded_to(main, copy_at.dtype.element_ty), mask=inside)


def adamw_shard(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    numbers: AdamW,
    *,
    scales: tuple[torch.Tensor, ...],
    copy: torch.Tensor | None,
) -> None:
    """As `adamw_shard_torch`, without fused multiplications and additions."""
    with torch.cuda.device_of(main):
        for here in launches(main.numel()):
            adamw_shard_kernel[grid_for(here.stop - here.start)](
                main[here],
                exp_avg[here],
                exp_avg_sq[here],
                grad[here],
                main[here] if copy is None else copy[here],
                *scales,
                here.stop - here.start,
                numbers.kept,
                numbers.added,
                1 - numbers.beta1,
                numbers.beta2,
                1 - numbers.beta2,
                numbers.root_of_bias2,
                numbers.eps,
                numbers.step_size,
                IS_ADDED=numbers.added != 0,
                IS_MOSTLY_NEW=numbers.beta1 <= 0.5,
                HAS_COPY=copy is not None,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )


# `norm_and_flag` in Triton.


MAX_PROGRAMS = 16384
"""Of a launch, on every GPU: the order of the sum must not depend on the number of processors. Many
times as many as run at once, so that no processor idles for long at the end."""


@triton.jit
def norm_and_flag_kernel(shard, numel, turns, sums, counts, BLOCK: tl.constexpr):
    """Program p of P adds up blocks p, p + P, p + 2P ..., `turns` of them."""
    squares = tl.zeros([BLOCK], tl.float64)
    not_finite = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at = elements_of(tl.program_id(0) + turn * tl.num_programs(0), BLOCK)
        values = tl.load(shard + at, mask=at < numel, other=0.0).to(tl.float32)
        wide = values.to(tl.float64)
        squares += wide * wide
        not_finite += (tl.abs(values) < float("inf")).to(tl.int32) ^ 1
    tl.store(sums + tl.program_id(0), tl.sum(squares))
    tl.store(counts + tl.program_id(0), tl.sum(not_finite.to(tl.int64)).to(tl.float64))


def norm_and_flag(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """As `norm_and_flag_torch`: one launch or two per shard, and one for what they found."""
    pieces = [shard[here] for shard in shards for here in launches(shard.numel())]
    programs = [min(grid_for(piece.numel())[0], MAX_PROGRAMS) for piece in pieces]
    found = torch.empty(2, sum(programs), dtype=torch.float64, device=device)
    start = 0
    with torch.cuda.device_of(found):
        for piece, count in zip(pieces, programs, strict=True):
            norm_and_flag_kernel[(count,)](
                piece,
                piece.numel(),
                triton.cdiv(piece.numel(), BLOCK.value * count),
                found[0, start:],
                found[1, start:],
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
            start += count
        return found.sum(1)


# `sum_parts` in Triton.


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
    out: torch.Tensor, parts: tuple[torch.Tensor, ...], weights: tuple[float, ...]
) -> None:
    """As `sum_parts_torch`."""
    if not parts:
        out.zero_()
    # What the first launch overwrites must not be read by a later one.
    late = parts[MAX_PARTS:]
    late = tuple(part.clone() if part.data_ptr() == out.data_ptr() else part for part in late)
    parts = parts[:MAX_PARTS] + late
    with torch.cuda.device_of(out):
        for here in launches(out.numel()):
            _launch(out[here], [part[here] for part in parts], weights)


def _launch(out: torch.Tensor, parts: list[torch.Tensor], weights: tuple[float, ...]) -> None:
    for first in range(0, len(parts), MAX_PARTS):
        some = slice(first, first + MAX_PARTS)
        sum_parts_kernel[grid_for(out.numel())](
            out,
            tuple(parts[some]),
            weights[some],
            out.numel(),
            ADD=first > 0,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel for kernel in (adamw_shard, norm_and_flag, sum_parts)
}
