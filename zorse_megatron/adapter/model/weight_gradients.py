"""Weight gradients of Megatron's own linear layers as an action of their own.

Such a layer computes both gradients in one autograd function. Within `delaying` that function
computes those of its input and its bias, and leaves what the weight's is the product of: the
layer's input and the gradient of its output. `compute` multiplies them later and passes the result
to autograd, which accumulates it as it would have. Per weight the order of micro-batches stays that
of the backwards, and each product is the same one, so gradients are equal to the bit.

Megatron's `--delay-wgrad-compute` does the same in layers of Transformer Engine, between layers of
two micro-batches that overlap, not between actions.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.memory.memory_probes import KeptActivations

_NUM_INPUTS = 10
"""Of stock's autograd function: each gets a gradient, or None."""


@dataclass(frozen=True, kw_only=True)
class _Product:
    """What one weight's gradient is made of."""

    weight: torch.nn.Parameter
    inputs: torch.Tensor
    """[tokens, batch, width]; with sequence parallelism this rank's part of the tokens."""
    output_gradients: torch.Tensor
    """[tokens x batch, width]."""
    group: dist.ProcessGroup | None
    """Over which the inputs are to be gathered."""


class WeightGradients:
    """What one rank's backwards have left, by (chunk, micro-batch)."""

    def __init__(self) -> None:
        self.kept: KeptActivations | None = None
        """Counts what waits, if asked to."""
        self._weights: set[int] = set()
        self._waiting: dict[tuple[int, int], list[_Product]] = {}
        self._products: list[_Product] | None = None
        """Of the backward that runs."""

    def watch(self, chunk: torch.nn.Module) -> None:
        """Delay the matrices of a chunk's layers; embedding and output layer stay as they are."""
        self._weights |= {
            id(module.weight)
            for module in unwrap_model(chunk).decoder.layers.modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        }

    @contextmanager
    def delaying(self, key: tuple[int, int]) -> Iterator[None]:
        """Within the block, backwards leave products to `compute(key)`."""
        self._products = self._waiting[key] = []
        try:
            yield
        finally:
            self._products = None

    def compute(self, key: tuple[int, int]) -> None:
        """Compute what a backward has left, and accumulate it."""
        products = self._waiting.pop(key)
        assert products or not self._weights, "the backward has computed weight gradients itself"
        products.reverse()
        following = _start_gather(products[-1]) if products else None
        while products:
            product, gathered = products.pop(), following
            following = _start_gather(products[-1]) if products else None  # beside this product
            inputs = product.inputs if gathered is None else gathered()
            gradient = product.output_gradients.t().matmul(_flat(inputs))
            torch.autograd.backward(product.weight, gradient)

    def takes(self, ctx: Any) -> bool:
        """Whether an autograd function's weight gradient is to wait."""
        if self._products is None:
            return False
        node, _ = ctx.next_functions[1]
        return id(getattr(node, "variable", None)) in self._weights

    def leave(
        self, ctx: Any, weight: Any, inputs: torch.Tensor, output_gradients: torch.Tensor
    ) -> None:
        """Note a product of the backward that runs."""
        assert self._products is not None
        inputs, output_gradients = inputs.detach(), output_gradients.detach()
        if self.kept is not None:
            self.kept.hold(inputs)
            self.kept.hold(output_gradients)
        self._products.append(
            _Product(
                weight=weight,
                inputs=inputs,
                output_gradients=output_gradients,
                group=ctx.tp_group if ctx.sequence_parallel else None,
            )
        )


def delaying_weights(
    waiting: WeightGradients, stock: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """Return what takes the place of the backward of stock's autograd function (`stock`)."""

    @functools.wraps(stock)
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
        if not waiting.takes(ctx):
            return stock(ctx, grad_output)
        inputs, weight = ctx.saved_tensors
        grad_input = grad_output.matmul(weight)
        sums = _start_sums(ctx, grad_input)
        flat = _flat(grad_output)
        waiting.leave(ctx, weight, inputs, flat)
        grad_bias = flat.sum(dim=0) if ctx.use_bias else None
        return (sums(), None, grad_bias, *[None] * (_NUM_INPUTS - 3))

    return backward


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """[tokens x batch, width], as stock multiplies it."""
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _start_sums(ctx: Any, grad_input: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start the sum over the set, if there is one; what is returned waits for its result."""
    if ctx.sequence_parallel:
        shape: Sequence[int] = (grad_input.shape[0] // ctx.tp_group.size(), *grad_input.shape[1:])
        part = grad_input.new_empty(shape)
        work = dist.reduce_scatter_tensor(part, grad_input, group=ctx.tp_group, async_op=True)
        return lambda: _after(work, part)
    if ctx.allreduce_dgrad:
        work = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        return lambda: _after(work, grad_input)
    return lambda: grad_input


def _start_gather(product: _Product) -> Callable[[], torch.Tensor] | None:
    """Start to gather the inputs of a set with sequence parallelism; None: they are whole."""
    if product.group is None:
        return None
    part = product.inputs
    whole = part.new_empty((part.shape[0] * product.group.size(), *part.shape[1:]))
    work = dist.all_gather_into_tensor(whole, part, group=product.group, async_op=True)
    return lambda: _after(work, whole)


def _after(work: Any, result: torch.Tensor) -> torch.Tensor:
    work.wait()
    return result
