"""How a group's gradients are sent: the plan's word, in torch's terms."""

import torch

from zorse_megatron.runtime.narrow_wire import Wire
from zorse_megatron.schema.plan import Plan


def wire_of(plan: Plan, rank: int, *, sequence_length: int) -> Wire | None:
    """The wire of the rank's group; None where gradients are sent as they are kept.

    Gradients are sums over tokens until SCALE divides them. In fp16 they are sent as means, so that
    they have the range that the loss scale is for: divided by the next power of two of the global
    batch's tokens. bf16 has the range of fp32.
    """
    name = plan.groups[plan.group_of_rank(rank)].gradient_wire
    if name is None:
        return None
    if name == "bf16":
        return Wire(dtype=torch.bfloat16)
    tokens = plan.global_batch_size * sequence_length
    return Wire(dtype=torch.float16, factor=2.0 ** -(tokens - 1).bit_length())
