"""Products of tokens with the matrices of their experts, without a wait for who has how many.

Tokens are sorted by expert. As every kernel here, each product has two bodies: Triton
(`grouped_gemm_on_triton`), one launch for all experts, and plain torch, one product per expert,
which is the reference and waits for the counts. Below compute capability 8.0 plain torch runs on
GPUs too: Triton has no instructions of tensor cores for them, cuBLAS has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from zorse_megatron.gpus.gpu import PRODUCTS_IN_TRITON_FROM
from zorse_megatron.kernels import dispatch
from zorse_megatron.kernels.dispatch import Kernel


@dataclass(frozen=True, kw_only=True)
class GroupedProduct:
    """What the gradients of all experts' weights are made of."""

    inputs: torch.Tensor
    """[T, h]"""
    output_gradients: torch.Tensor
    """[T, n]"""
    counts: torch.Tensor
    weights: Sequence[torch.Tensor]
    main_grads: Sequence[torch.Tensor] | None
    """To add to; None: gradients are autograd's."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept for as long as this waits."""
        return self.inputs, self.output_gradients

    def start(self) -> None:
        """Nothing is to be gathered."""

    def accumulate(self, gathered: Callable[[], torch.Tensor] | None = None) -> None:
        """Compute the gradients: into `main_grads`, or for autograd to accumulate."""
        assert gathered is None
        gradients = self.gradients()
        if gradients is not None:
            torch.autograd.backward(self.weights, gradients)

    @torch.no_grad()
    def gradients(self) -> tuple[torch.Tensor, ...] | None:
        """Compute and return them; None: they have been added to `main_grads`."""
        compute = _pick("grouped_weights", self.inputs.device, grouped_weights_torch)
        if self.main_grads is not None:
            compute(*self.tensors, self.counts, self.main_grads, add=True)
            for weight in self.weights:
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
            return None
        # Of each its own memory: `.grad` keeps it, and lets go of it, by itself.
        out = tuple(torch.empty_like(weight) for weight in self.weights)
        compute(*self.tensors, self.counts, out, add=False)
        return out


def grouped_linear(
    x: torch.Tensor,
    counts: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    main_grads: Sequence[torch.Tensor] | None = None,
    later: Callable[[GroupedProduct], None] | None = None,
    has_rest: bool = False,
) -> torch.Tensor:
    """Return y [T, n], where y[t] = weights[e] x[t] for the expert e that token t is of.

    `x`: [T, h], contiguous, sorted by expert, in fp32, bf16 or fp16. `counts`: [E] int64, tokens of
    each expert; they add up to T, or with `has_rest` to less: rows that follow have no expert, and
    y, and the gradient of x, are zero there. In Triton nothing waits for them (`placed_counts`).
    `weights`: E tensors [n, h], contiguous, of x's dtype and device, each below 2^31 elements; all
    of them need a gradient or none. 16-bit products are added in fp32, fp32 ones without TF32.

    Gradients of weights: without `main_grads` autograd gets E tensors (of zeros for an expert
    without tokens). Else they are added, unrounded, to `main_grads`, E contiguous tensors [n, h] of
    one dtype, an expert without tokens left untouched; `.grad` stays None, and as with Megatron's
    fused accumulation `grad_added_to_main_grad` becomes True where a weight has it. Autograd's
    hooks on weights run in both cases; stock's one of `--overlap-grad-reduce` needs a `.grad`.
    Each sum has an order that depends on the shapes only: two runs give the same bits.

    `later`: gets what the backward would have computed weights' gradients from, and calls its
    `accumulate`, at once or later.
    """
    result: torch.Tensor = _GroupedLinear.apply(main_grads, later, has_rest, x, counts, *weights)
    return result


def placed_counts(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `counts` where `grouped_linear` needs them for an `x` on `device`.

    That is there for Triton, and on the CPU for plain torch. Whoever multiplies several times by
    the same counts calls this once before, and so waits once where plain torch runs.
    """
    if _pick("grouped_rows", device, grouped_rows_torch) is grouped_rows_torch:
        return counts.cpu()
    return counts.to(device, non_blocking=True)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  (torch's way)
        ctx: Any,
        main_grads: Sequence[torch.Tensor] | None,
        later: Callable[[GroupedProduct], None] | None,
        has_rest: bool,
        x: torch.Tensor,
        counts: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        compute = _pick("grouped_rows", x.device, grouped_rows_torch)
        counts = placed_counts(counts, x.device)
        ctx.main_grads, ctx.later, ctx.has_rest = main_grads, later, has_rest
        ctx.save_for_backward(x if ctx.needs_input_grad[5] else None, counts, *weights)
        y: torch.Tensor = compute(x, counts, weights, transposed=True, has_rest=has_rest)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, counts, *weights = ctx.saved_tensors
        dy, dx = dy.contiguous(), None
        if ctx.needs_input_grad[3]:
            compute = _pick("grouped_rows", dy.device, grouped_rows_torch)
            dx = compute(dy, counts, weights, transposed=False, has_rest=ctx.has_rest)
        gradients = None
        if x is not None:
            product = GroupedProduct(
                inputs=x.detach(),
                output_gradients=dy,
                counts=counts,
                weights=weights,
                main_grads=ctx.main_grads,
            )
            gradients = product.gradients() if ctx.later is None else ctx.later(product)
        return (None, None, None, dx, None, *(gradients or [None] * len(weights)))


def _pick(name: str, device: torch.device, in_torch: Kernel) -> Kernel:
    if dispatch.why_not_triton(device) is not None:
        return in_torch
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < PRODUCTS_IN_TRITON_FROM:
        return in_torch
    from zorse_megatron.kernels.grouped_gemm_on_triton import KERNELS

    return KERNELS[name]


def grouped_rows_torch(
    x: torch.Tensor,
    counts: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    transposed: bool,
    has_rest: bool = False,
) -> torch.Tensor:
    """The reference of x[t] W_e^T (`transposed`: y [T, n] of x [T, h]), and of x[t] W_e."""
    matrices = [weight.t() for weight in weights] if transposed else weights
    y = output_rows(x, matrices[0].shape[1], has_rest=has_rest)
    for start, stop, matrix in zip(*_bounds(counts), matrices, strict=True):
        torch.mm(x[start:stop], matrix, out=y[start:stop])
    return y


def output_rows(x: torch.Tensor, width: int, *, has_rest: bool) -> torch.Tensor:
    """What a product of x's rows is written to."""
    return (x.new_zeros if has_rest else x.new_empty)(x.shape[0], width)


def _bounds(counts: torch.Tensor) -> tuple[list[int], list[int]]:
    """Where each expert's rows start, and where they stop."""
    stops = list(accumulate(counts.tolist()))
    return [0, *stops[:-1]], stops


def grouped_weights_torch(
    x: torch.Tensor,
    dy: torch.Tensor,
    counts: torch.Tensor,
    out: Sequence[torch.Tensor],
    *,
    add: bool,
) -> None:
    """The reference of dy_e^T x_e: written into `out`, or added to it."""
    for start, stop, total in zip(*_bounds(counts), out, strict=True):
        inputs, gradients = x[start:stop], dy[start:stop]
        if not add:
            torch.mm(gradients.t(), inputs, out=total)
        elif len(inputs):
            total.add_(_in_fp32(gradients.t(), inputs))


def _in_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Their product, not rounded to 16 bits."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
