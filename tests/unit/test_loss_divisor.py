"""What the loss is divided by in jobs with fp16, and what is left to divide in fp16 messages."""

import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan_samples import good, load
from zorse_megatron.adapter.data_parallel.ddp_options import comm_dtype_of
from zorse_megatron.adapter.loss import loss_divisor, tokens_as_power_of_two, with_token_counts
from zorse_megatron.plan.plan import Plan

PLAN = load(good())
TOKENS_EACH = 32
NEAREST = 1024.0
"""To 24 samples of 32 tokens: 768 is 1.5 times 512, and 1024 is 1.33 times 768."""


@given(batch=st.integers(1, 2**20), sequence_length=st.integers(1, 2**20))
def test_nearest_power_of_two(batch: int, sequence_length: int) -> None:
    plan = dataclasses.replace(PLAN, global_batch_size=batch)
    power = Fraction(tokens_as_power_of_two(plan, sequence_length=sequence_length))
    assert power.denominator == 1
    assert power.numerator.bit_count() == 1
    assert Fraction(1, 2) <= (power / (batch * sequence_length)) ** 2 <= 2


@pytest.mark.parametrize(
    ("dtypes", "is_sum", "expected"),
    [
        (("fp16",), False, NEAREST),
        (("bf16", "fp16", "fp32"), False, NEAREST),
        (("bf16", "fp32"), False, 1.0),
        (("fp32",), False, 1.0),
        (("fp16",), True, 1.0),
    ],
)
def test_where_there_is_fp16_and_no_sum_is_asked_for(dtypes, is_sum, expected) -> None:
    found = loss_divisor(PLAN, dtypes, sequence_length=TOKENS_EACH, is_sum=is_sum)
    assert found == expected


@given(data=st.data(), batch=st.integers(1, 64), sequence_length=st.integers(1, 512))
def test_masked_tokens_make_gradients_smaller_than_stocks_never_larger(
    data: st.DataObject, batch: int, sequence_length: int
) -> None:
    """Stock divides a micro-batch's loss by its tokens that count, and by the micro-batches.

    Source: `forward_step_calc_loss` in megatron.core.pipeline_parallel.schedules.
    """
    size = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    count = data.draw(st.integers(1, size * sequence_length))
    stock = Fraction(1, count) / (batch // size)
    plan = dataclasses.replace(PLAN, global_batch_size=batch)
    ours = 1 / Fraction(tokens_as_power_of_two(plan, sequence_length=sequence_length))
    share = Fraction(count, size * sequence_length)
    assert Fraction(1, 2) <= (ours / (stock * share)) ** 2 <= 2


@pytest.mark.parametrize("divisor", [1.0, NEAREST])
def test_fp16_messages_have_the_size_of_means(divisor: float) -> None:
    assert factor(PLAN, "fp16", divisor) * torch.tensor(NEAREST) / divisor == 1.0
    assert factor(PLAN, "bf16", divisor) == 1.0


def factor(plan: Plan, comm_dtype: str, divisor: float) -> float:
    groups = tuple(dataclasses.replace(group, gradient_wire=comm_dtype) for group in plan.groups)
    planned = dataclasses.replace(plan, groups=groups)
    found = comm_dtype_of(planned, 0, sequence_length=TOKENS_EACH, loss_divisor=divisor)
    assert found is not None
    return found.factor


def test_the_report_is_of_the_loss_as_it_is() -> None:
    weights = torch.ones(3, requires_grad=True)

    def forward_step(*_: object) -> tuple:
        def loss_of(output: torch.Tensor) -> tuple:
            loss = output.sum()
            return loss, torch.tensor(3), {"lm loss": torch.stack([loss, torch.tensor(3.0)])}

        return 5 * weights, loss_of

    output, loss_of = with_token_counts(forward_step, NEAREST)()
    loss, num_tokens, report = loss_of(output)
    assert (loss.item(), num_tokens.item()) == (15 / NEAREST, 3)
    assert report["lm loss"].tolist() == [15.0, 3.0]
    loss.backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [5 / NEAREST] * 3
