"""What the loss is divided by before its backward, so that fp16 gradients have stock's size.

Under a plan the loss is a sum over tokens, and gradients are divided by the number of tokens after
the last sum (SCALE). By default stock divides the loss itself: its 16-bit gradients are those of a
mean, which is what loss scales are chosen for. Gradients of a sum are larger by the tokens of a
batch: of fp16's 40 powers of two, which a loss scale is to place them in, a batch of 131,072 tokens
would take 17.
"""

from collections.abc import Collection

from zorse_megatron.schema.plan.plan import ComputeDtype, Plan


def tokens_as_power_of_two(plan: Plan, *, sequence_length: int) -> float:
    """The power of two nearest to the tokens of a global batch, masked ones included."""
    tokens = plan.global_batch_size * sequence_length
    below = tokens.bit_length() - 1
    # Nearest by ratio: beyond the square root of two the next one is.
    return 2.0 ** (below + (tokens**2 > 2 ** (2 * below + 1)))


def loss_divisor(
    plan: Plan, dtypes: Collection[ComputeDtype], *, sequence_length: int, is_sum: bool
) -> float:
    """The divisor of one job, the same on all ranks and in all steps.

    `dtypes`: what groups compute in. bf16 has fp32's range and takes sums as they are, so a job
    without fp16 has 1. `is_sum`: whether the command itself says --calculate-per-token-loss; its
    loss scale is for the gradients of a sum then, as under stock.

    A power of two changes no digit of a number that neither overflows nor underflows.
    """
    if is_sum or "fp16" not in dtypes:
        return 1.0
    return tokens_as_power_of_two(plan, sequence_length=sequence_length)
