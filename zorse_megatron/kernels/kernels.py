"""One-pass kernels that move or update whole shards, each with its reference in plain torch.

Every kernel is a function with two bodies: Triton (`on_triton`) and plain torch, which is the
reference and runs wherever Triton does not. `dispatch` decides which, and says so once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zorse_megatron.kernels.dispatch import check_flat, chunks, pick


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """The numbers of one step; as `torch.optim.AdamW`'s (Apex: `adam_w_mode`)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counted from 1: the first update has 1."""
    decoupled: bool = True
    """Whether weights decay by themselves (AdamW); else weight decay is added to the gradient."""

    @property
    def step_size(self) -> float:
        """The learning rate over the first moment's bias."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def root_of_bias2(self) -> float:
        """What the root of the second moment is divided by."""
        return math.sqrt(1 - self.beta2**self.step)

    @property
    def kept(self) -> float:
        """What is left of a weight after decoupled decay."""
        return 1 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def added(self) -> float:
        """The part of a weight that is added to its gradient."""
        return 0.0 if self.decoupled else self.weight_decay


@torch.no_grad()
def adamw_shard(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    numbers: AdamW,
    *,
    inv_scale: float | torch.Tensor = 1.0,
    clip: float | torch.Tensor = 1.0,
    copy: torch.Tensor | None = None,
) -> None:
    """Update `main` and its moments in place, and write `main` into `copy` too.

    All are [n], contiguous, on one device and apart in its memory; `main`, `exp_avg` and
    `exp_avg_sq` in fp32, `grad` in fp32, bf16 or fp16 (it is only read), `copy` (None: no copy) in
    any of these, rounded to nearest even. The gradient is multiplied by `inv_scale` (1 / loss
    scale), then by `clip` (the clip coefficient, at most 1), as Megatron does; each a number or a
    tensor with one fp32 element on the device, that nothing waits for.

    Source of the operations and their order: torch/optim/adam.py `_single_tensor_adam`;
    megatron/core/optimizer/optimizer.py `MixedPrecisionOptimizer.step`. Plain torch gives the bits
    of `torch.optim.AdamW`; Triton fuses no multiplication with an addition, as torch does on some
    processors, and agrees within a few units in the last place. Infinite or NaN gradients go
    through, into `main`: skip the step instead (`norm_and_flag`). Raises ValueError for lengths,
    types or devices that differ.
    """
    stepped = {"main": main, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_flat("adamw_shard", stepped, main, (torch.float32,))
    others = {"grad": grad} if copy is None else {"grad": grad, "copy": copy}
    check_flat("adamw_shard", others, main)
    scales = tuple(_on_device(factor, main.device) for factor in (inv_scale, clip))
    update = pick("adamw_shard", main.device, adamw_shard_torch)
    update(main, exp_avg, exp_avg_sq, grad, numbers, scales=scales, copy=copy)


def _on_device(factor: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(factor, torch.Tensor):
        return factor.reshape(())
    return torch.full((), factor, dtype=torch.float32, device=device)


def adamw_shard_torch(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    numbers: AdamW,
    *,
    scales: tuple[torch.Tensor, ...],
    copy: torch.Tensor | None,
) -> None:
    """The reference. `scales`: 0-d tensors, `inv_scale` and `clip`."""
    for chunk in chunks(main.numel()):
        wide = grad[chunk].float()
        for scale in scales:
            wide = wide * scale
        step_torch(main[chunk], exp_avg[chunk], exp_avg_sq[chunk], wide, numbers)
        if copy is not None:
            copy[chunk].copy_(main[chunk])


def step_torch(
    main: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    numbers: AdamW,
) -> None:
    """The step itself, with torch's operations for its bits; `grad`: fp32, scaled."""
    if numbers.added:
        grad = grad.add(main, alpha=numbers.added)
    main.mul_(numbers.kept)
    exp_avg.lerp_(grad, 1 - numbers.beta1)
    exp_avg_sq.mul_(numbers.beta2).addcmul_(grad, grad, value=1 - numbers.beta2)
    divisor = exp_avg_sq.sqrt().div_(numbers.root_of_bias2).add_(numbers.eps)
    main.addcdiv_(exp_avg, divisor, value=-numbers.step_size)


# The sum of squares of gradients and whether any is infinite or NaN, in one pass over them.


@torch.no_grad()
def norm_and_flag(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[2] in fp64 on `device`, for one all-reduce (sum): the sum of squares, infinite or NaN where
    an element is, and 0, or something else where one is. Nothing has waited for the device yet.

    `shards`: 1-D and contiguous, on `device`, of any sizes (0 too), in fp32, bf16 or fp16; there
    may be none. Each element is read once. Squares are added in fp64 in an order that depends on
    the sizes only, so two runs give the same bits, and a finite element never overflows.
    """
    return pick("norm_and_flag", device, norm_and_flag_torch)(shards, device)


def norm_and_flag_torch(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The reference."""
    parts = []
    for shard in shards:
        cut = list(chunks(shard.numel()))
        parts += [shard] if len(cut) == 1 else [shard[chunk] for chunk in cut]
    if not parts:
        return torch.zeros(2, dtype=torch.float64, device=device)
    norms = torch._foreach_norm(parts, 2, torch.float64)
    square = torch.stack(norms).square_().sum()
    return torch.stack([square, square - square])  # 0, or NaN where the square is not finite


# The owner's half of an uneven reduce-scatter: add what the others sent, in fp32.


@torch.no_grad()
def sum_parts(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weights: Sequence[float] | None = None,
) -> None:
    """Write weights[0] * parts[0] + weights[1] * parts[1] + ... into the fp32 `out`.

    `out`: [n], contiguous. `parts`: k tensors [n] on its device, each in fp32, bf16 or fp16 (rows
    of what an all-to-all received, and this rank's own part, say); one of them may be `out` itself,
    otherwise none overlaps it. Parts that start at multiples of 16 bytes are read fastest.
    `weights`: k numbers, rounded to fp32; None: ones.

    Each part is widened to fp32 (exact), multiplied (rounded once) and added (rounded once) in the
    order of `parts`, never fused: the bits depend on the arguments alone, not on what arrived
    first nor on the device. With no parts `out` becomes zero. Raises ValueError for lengths, types
    or devices that differ.
    """
    factors = (1.0,) * len(parts) if weights is None else tuple(map(float, weights))
    check_flat("sum_parts", {"out": out}, out, (torch.float32,))
    check_flat("sum_parts", {f"parts[{at}]": part for at, part in enumerate(parts)}, out)
    pick("sum_parts", out.device, sum_parts_torch)(out, tuple(parts), factors)


def sum_parts_torch(
    out: torch.Tensor, parts: tuple[torch.Tensor, ...], weights: tuple[float, ...]
) -> None:
    """The reference."""
    for chunk in chunks(out.numel()):
        here = out[chunk]
        # The first term is not added to zero: -0.0 stays as it is.
        total = None
        for part, weight in zip(parts, weights, strict=True):
            # A product of its own: `add_(part, alpha=weight)` is fused on some processors.
            term = part[chunk].float() * weight
            total = term if total is None else total.add_(term)
        here.copy_(torch.zeros_like(here) if total is None else total)
