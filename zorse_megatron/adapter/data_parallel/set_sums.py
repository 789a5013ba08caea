"""Gradients of what all ranks of a tensor-parallel set hold whole, but each saw a part of.

With sequence parallelism a rank has its own positions only between layers, so its gradients of
norms and of biases added there are of those alone; and norms of queries and keys have seen the
rank's own heads only. They are summed over the set, once, before anything else is. All other
gradients of what a set holds whole are the same on its ranks.

Source: `megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads`,
which sums after the data-parallel sum, when a plan's ranks have let go of what they do not own.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

_OF_HEADS = ("q_layernorm", "k_layernorm")


def set_sums_of(model: torch.nn.Module, config: Any) -> set[torch.nn.Parameter]:
    """The parameters whose gradients are to be summed over the set."""
    return {
        parameter
        for name, parameter in unwrap_model(model).named_parameters()
        if parameter.requires_grad
        and (
            (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
            or (config.qk_layernorm and any(norm in name for norm in _OF_HEADS))
        )
    }


@torch.no_grad()
def sum_over_set(parameters: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Sum their gradients over the set, in one message."""
    if not parameters:
        return
    gradients = [parameter.main_grad for parameter in parameters]
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(together, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, total in zip(gradients, together.split(sizes), strict=True):
        gradient.copy_(total.view_as(gradient))
