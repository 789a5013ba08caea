"""How a group's gradients are sent: the plan's word, in torch's terms."""

import torch

from zorse_megatron.adapter.loss.loss_divisor import tokens_as_power_of_two
from zorse_megatron.runtime.narrow_wire import Wire
from zorse_megatron.schema.plan.plan import Plan


def wire_of(plan: Plan, rank: int, *, sequence_length: int, loss_divisor: float) -> Wire | None:
    """The wire of the rank's group; None where gradients are sent as they are kept.

    In fp16 gradients are sent in the size of means: divided by the tokens of the global batch, to a
    power of two, if the loss was not (`loss_divisor`: what it was divided by). bf16 has the range
    of fp32.
    """
    name = plan.groups[plan.group_of_rank(rank)].gradient_wire
    if name is None:
        return None
    if name == "bf16":
        return Wire(dtype=torch.bfloat16)
    mean = tokens_as_power_of_two(plan, sequence_length=sequence_length)
    return Wire(dtype=torch.float16, factor=loss_divisor / mean)
