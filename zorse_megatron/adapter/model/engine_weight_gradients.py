"""Weight gradients of Transformer Engine's layers as an action of their own.

Such a layer has a store for weight gradients that are delayed (`WeightGradStore` of
`transformer_engine.pytorch.module`, since 2.3): its backward puts there the tensors that the
gradient is computed from and the function that computes it. Megatron turns it on with
`--delay-wgrad-compute`, which it allows only where it overlaps the communication of experts, and
calls `backward_dw`, which takes what was put first. Here `EngineStore` takes the store's place, as
what is computed next is a matter of the plan's list; and autograd accumulates the result, so
Megatron's hooks see what they see without it. With fused accumulation the function itself adds to
`main_grad`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zorse_megatron.errors import FlagError, Problem

_FIRST_VERSION = "2.3"


@dataclass(frozen=True, kw_only=True)
class EngineProduct:
    """What one layer's weight gradient is made of, and its bias's where both are one kernel."""

    module: Any
    tensors: Sequence[torch.Tensor]
    """The layer's inputs, whole also with sequence parallelism, and its output's gradients."""
    compute: Callable[..., Sequence[torch.Tensor | None]]
    """Takes `tensors`; returns the gradients of weight and bias."""
    fused_into: int | None
    """With fused accumulation, where `compute` adds to."""

    def start(self) -> None:
        """Nothing is to be gathered."""

    def accumulate(self, gathered: Callable[[], torch.Tensor] | None) -> None:
        """Compute the gradients and let autograd accumulate them, or `main_grad` have them."""
        assert gathered is None
        weight = self.module.weight
        if self.fused_into is not None:
            assert self.fused_into == weight.main_grad.data_ptr(), "gradients have moved meanwhile"
        with torch.no_grad():  # as in the backward that the function is of
            of_weight, of_bias, *_ = self.compute(*self.tensors)
        if self.fused_into is None:
            assert of_weight is not None
            torch.autograd.backward(weight, of_weight.to(weight.dtype))
        # Where something else adds the bias, its gradient is that one's.
        if of_bias is not None and of_bias.numel():
            torch.autograd.backward(self.module.bias, of_bias.to(self.module.bias.dtype))


@dataclass(frozen=True, kw_only=True)
class EngineStore:
    """Stands for a layer's `WeightGradStore`, which is asked in its forward and in its backward."""

    module: Any
    leave: Callable[[EngineProduct], None]

    def delay_wgrad_compute(self) -> bool:
        """Whether `put` is called in place of the computation."""
        return True

    def put(self, tensors: Sequence[torch.Tensor], compute: Callable[..., Any]) -> None:
        """Take what a backward leaves."""
        is_fused = self.module.fuse_wgrad_accumulation
        self.leave(
            EngineProduct(
                module=self.module,
                tensors=tuple(tensors),
                compute=compute,
                fused_into=self.module.weight.main_grad.data_ptr() if is_fused else None,
            )
        )


def delay_in_engine(layers: torch.nn.Module, leave: Callable[[EngineProduct], None]) -> set[int]:
    """Have layers of Transformer Engine call `leave` in place of computing weight gradients.

    Returns the identities of their weights. Raises FlagError for layers that cannot.
    """
    found = {
        name: module
        for name, module in layers.named_modules()
        if hasattr(module, "fuse_wgrad_accumulation")
    }
    problems = [
        Problem(
            where=f"split_backward: {name} ({type(module).__name__})",
            found=why,
            expected="a layer of Transformer Engine with one weight, whose gradient can wait",
            remedy="Remove split_backward from the plan, or use --transformer-impl local.",
        )
        for name, module in found.items()
        if (why := _why_not(module)) is not None
    ]
    if problems:
        raise FlagError("Weight gradients cannot be computed apart from backwards", problems)
    for module in found.values():
        module.wgrad_store = EngineStore(module=module, leave=leave)
    return {id(module.weight) for module in found.values()}


def _why_not(module: Any) -> str | None:
    if getattr(module, "wgrad_store", None) is None:
        return f"no store for weight gradients, as before Transformer Engine {_FIRST_VERSION}"
    if not isinstance(getattr(module, "weight", None), torch.nn.Parameter):
        return "several weights"
    return None
