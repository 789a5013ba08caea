"""Linear layers that compute and accumulate as Transformer Engine's do, on a CPU.

After `_Linear` and `WeightGradStore` of `transformer_engine.pytorch.module` (2.9; 2.20.dev0 asks
the store in the forward already): the weight's gradient and, where the layer adds it, the bias's
are one product; a store that delays gets its operands and a function in its place; with fused
accumulation the product is added to `main_grad`, and autograd gets a tensor that means nothing. For
replicas of one rank.
"""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class NotDelaying:
    """A `WeightGradStore` as it is made without `delay_wgrad_compute`."""

    def delay_wgrad_compute(self) -> bool:
        return False


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any, inputs: Any, bias: Any, told: SimpleNamespace) -> Any:
        ctx.save_for_backward(inputs, weight)
        ctx.bias, ctx.weight, ctx.told = bias, weight, told
        output = torch.matmul(inputs, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, grad_output: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        is_fused, store = ctx.told.is_fused, ctx.told.store
        main_grad = ctx.weight.main_grad if is_fused else None
        has_bias = ctx.bias is not None

        def product(x: torch.Tensor, dy: torch.Tensor) -> Any:
            x, dy = (t.contiguous().view(-1, t.shape[-1]) for t in (x, dy))
            gradient = dy.t().matmul(x)
            if main_grad is not None:
                gradient = main_grad.add_(gradient)
            return gradient, dy.sum(dim=0) if has_bias else None

        grad_weight, grad_bias = None, None
        if store is not None and store.delay_wgrad_compute():
            store.put([inputs, grad_output], product)
        else:
            grad_weight, grad_bias = product(inputs, grad_output)
        if is_fused:
            ctx.weight.grad_added_to_main_grad = True
            grad_weight = torch.full_like(weight, torch.nan)
        return grad_weight, grad_output.matmul(weight), grad_bias, None


class _EngineLike:
    """What both layers have; Megatron keeps attention's weights from being fused here."""

    wgrad_store: Any = NotDelaying()
    fuse_wgrad_accumulation: bool

    def forward(self: Any, inputs: torch.Tensor, *_: Any, **__: Any) -> Any:
        store = self.wgrad_store if self.wgrad_store.delay_wgrad_compute() else None
        told = SimpleNamespace(is_fused=self.fuse_wgrad_accumulation, store=store)
        bias = None if self.skip_bias_add else self.bias
        return _Linear.apply(self.weight, inputs, bias, told), (
            self.bias if self.skip_bias_add else None
        )


class EngineLikeColumn(_EngineLike, ColumnParallelLinear):  # type: ignore[misc]
    fuse_wgrad_accumulation = False


class EngineLikeRow(_EngineLike, RowParallelLinear):  # type: ignore[misc]
    fuse_wgrad_accumulation = True
