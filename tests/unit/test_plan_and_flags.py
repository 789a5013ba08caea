"""Whether the model of Megatron's parsed arguments is the plan's."""

import dataclasses
from argparse import Namespace

import pytest

from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.flags.flags_against_plan import model_flag_problems

NUM_HEADS = 4


@pytest.mark.parametrize(
    ("has_groups", "num_groups", "planned", "fits"),
    [
        (False, 1, NUM_HEADS, True),  # stock's default, which it does not use then
        (False, 1, 2, False),
        (True, 2, 2, True),
        (True, 1, NUM_HEADS, False),
    ],
)
def test_query_groups(has_groups: bool, num_groups: int, planned: int, fits: bool) -> None:
    plan = UNEVEN_PLAN
    model = dataclasses.replace(plan.model, num_query_groups=planned)
    args = Namespace(
        group_query_attention=has_groups,
        num_query_groups=num_groups,
        num_attention_heads=NUM_HEADS,
    )
    problems = model_flag_problems(args, dataclasses.replace(plan, model=model))
    assert [problem.where for problem in problems] == ([] if fits else ["--num-query-groups"])
