"""`kernels.adamw_shard` in Triton."""

import torch
import triton
import triton.language as tl

from zorse_megatron.kernels.adamw_shard import AdamW
from zorse_megatron.kernels.on_triton.blocks import (
    BLOCK,
    NUM_WARPS,
    elements_of,
    grid_for,
    launches,
    rounded_to,
)


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
