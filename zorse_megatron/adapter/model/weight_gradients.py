"""Weight gradients of Megatron's own linear layers as an action of their own.

Such a layer computes both gradients in one autograd function. Within `delaying` that function
computes those of its input and its bias, and leaves what the weight's is the product of: the
layer's input and the gradient of its output. `compute` multiplies them later and passes the result
to autograd, which accumulates it as it would have. Per weight the order of micro-batches stays that
of the backwards, and each product is the same one, so gradients are equal to the bit.

Layers of Transformer Engine leave the same to a store: see `engine_weight_gradients`.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.memory import SavedActivations
from zorse_megatron.adapter.model.engine_weight_gradients import EngineProduct, delay_in_engine
from zorse_megatron.adapter.model.expert_layers import GroupedExperts
from zorse_megatron.adapter.model.uneven_tp_shards import ToNothing
from zorse_megatron.kernels.grouped_gemm import GroupedProduct

_NUM_INPUTS = 10
"""Of stock's autograd function: each gets a gradient, or None."""


class _Product(Protocol):
    """What one weight's gradient is made of."""

    def start(self) -> Callable[[], torch.Tensor] | None:
        """Start to gather the inputs of a TP group with sequence parallelism; None: they are
        whole."""

    def accumulate(self, gathered: Callable[[], torch.Tensor] | None) -> None:
        """Compute the gradient and accumulate it; `gathered`: waits for the inputs."""


@dataclass(frozen=True, kw_only=True)
class _LinearProduct:
    """What one weight's gradient is made of, in a linear layer of Megatron's own."""

    weight: torch.nn.Parameter
    inputs: torch.Tensor
    """[tokens, batch, width]; with sequence parallelism this rank's part of the tokens."""
    output_gradients: torch.Tensor
    """[tokens x batch, width]."""
    group: dist.ProcessGroup | None
    """Over which the inputs are to be gathered."""

    def start(self) -> Callable[[], torch.Tensor] | None:
        """See `_Product`."""
        if self.group is None:
            return None
        part = self.inputs
        whole = part.new_empty((part.shape[0] * self.group.size(), *part.shape[1:]))
        work = dist.all_gather_into_tensor(whole, part, group=self.group, async_op=True)
        return lambda: _after(work, whole)

    def accumulate(self, gathered: Callable[[], torch.Tensor] | None) -> None:
        """See `_Product`."""
        inputs = self.inputs if gathered is None else gathered()
        gradient = self.output_gradients.t().matmul(_flat(inputs))
        torch.autograd.backward(self.weight, gradient)


class WeightGradients:
    """What one rank's backwards have left, by (chunk, micro-batch)."""

    def __init__(self) -> None:
        self.kept: SavedActivations | None = None
        """Counts what waits, if asked to."""
        self._weights: set[int] = set()
        """Of Megatron's own linear layers, by identity."""
        self._has_any = False
        self._waiting: dict[tuple[int, int], list[_Product]] = {}
        self._products: list[_Product] | None = None
        """Of the backward that runs."""

    def watch(self, chunk: torch.nn.Module) -> None:
        """Delay the matrices of a chunk's layers; embedding and output layer stay as they are.

        Raises FlagError for layers of Transformer Engine whose weight gradients cannot wait.
        """
        layers = unwrap_model(chunk).decoder.layers
        together = [each for each in layers.modules() if isinstance(each, GroupedExperts)]
        for experts in together:
            experts.delay_weights(self._leave)
        in_engine = delay_in_engine(layers, self._leave)
        self._weights |= {
            id(module.weight)
            for module in layers.modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
            if module.weight.requires_grad
        } - in_engine
        # A rank without samples leaves what its experts do, and these may be none.
        has_samples = not any(isinstance(each, ToNothing) for each in layers.modules())
        self._has_any |= has_samples and bool(self._weights or in_engine or together)

    def delaying(self, key: tuple[int, int]) -> AbstractContextManager[None]:
        """Within the block, backwards leave products to `compute(key)`."""
        self._waiting[key] = []
        return presented(self, _products=self._waiting[key])

    def compute(self, key: tuple[int, int]) -> None:
        """Compute what a backward has left, and accumulate it."""
        products = self._waiting.pop(key)
        assert products or not self._has_any, "the backward has computed weight gradients itself"
        products.reverse()
        following = products[-1].start() if products else None
        while products:
            product, gathered = products.pop(), following
            following = products[-1].start() if products else None  # beside this product
            product.accumulate(gathered)

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
        inputs, output_gradients = inputs.detach(), output_gradients.detach()
        product = _LinearProduct(
            weight=weight,
            inputs=inputs,
            output_gradients=output_gradients,
            group=ctx.tp_group if ctx.sequence_parallel else None,
        )
        self._keep(product, (inputs, output_gradients))

    def _leave(self, product: EngineProduct | GroupedProduct) -> None:
        """The same, of a layer of Transformer Engine or of experts, which leave all products."""
        if self._products is None:
            product.accumulate(None)  # in a backward that has no action of its own to follow
        else:
            self._keep(product, product.tensors)

    def _keep(self, product: _Product, tensors: Sequence[torch.Tensor]) -> None:
        assert self._products is not None
        if self.kept is not None:
            for tensor in tensors:
                self.kept.hold(tensor)
        self._products.append(product)


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
    """[tokens x batch, width], as stock multiplies it; the width may be 0."""
    return tensor.contiguous().flatten(end_dim=-2)


def _start_sums(ctx: Any, grad_input: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start the sum over the TP group, if there is one; what is returned waits for its result."""
    if ctx.sequence_parallel:
        shape: Sequence[int] = (grad_input.shape[0] // ctx.tp_group.size(), *grad_input.shape[1:])
        part = grad_input.new_empty(shape)
        work = dist.reduce_scatter_tensor(part, grad_input, group=ctx.tp_group, async_op=True)
        return lambda: _after(work, part)
    if ctx.allreduce_dgrad:
        work = dist.all_reduce(grad_input, group=ctx.tp_group, async_op=True)
        return lambda: _after(work, grad_input)
    return lambda: grad_input


def _after(work: Any, result: torch.Tensor) -> torch.Tensor:
    work.wait()
    return result
