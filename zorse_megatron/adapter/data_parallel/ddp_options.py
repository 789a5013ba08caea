"""Options of Megatron's DDP wrapper that unequal shards cannot keep; gradients' dtype."""

import torch

from zorse_megatron.adapter.loss import tokens_as_power_of_two
from zorse_megatron.plan.plan import Plan
from zorse_megatron.runtime.hierarchical_collectives import CommDtype


def comm_dtype_of(
    plan: Plan, rank: int, *, sequence_length: int, loss_divisor: float
) -> CommDtype | None:
    """How the rank's group sends gradients; None: in the dtype that they are kept in.

    In fp16 gradients are sent in the size of means: divided by the tokens of the global batch, to a
    power of two, if the loss was not (`loss_divisor`: what it was divided by). bf16 has the range
    of fp32.
    """
    name = plan.groups[plan.group_of_rank(rank)].grad_reduce_dtype
    if name is None:
        return None
    if name == "bf16":
        return CommDtype(dtype=torch.bfloat16)
    mean = tokens_as_power_of_two(plan, sequence_length=sequence_length)
    return CommDtype(dtype=torch.float16, factor=loss_divisor / mean)
