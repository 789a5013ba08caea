"""Sets whose ranks hold unequal parts of each layer follow a stock single process.

KV groups, columns of the MLP and rows of the vocabulary are cut apart from each other, in parts
that do not divide anything; a rank may hold no column.
"""

from pathlib import Path

import pytest

from tests.megatron.comparison import plan_of, plan_run, replica
from tests.megatron.set_plans import set_of
from tests.megatron.test_exactness import MASKED, flags_for
from tests.megatron.test_tensor_parallel import SEQUENCE_PARALLEL, assert_follows, stock_of
from zorse_megatron.schema.plan.plan import Parts, Plan

THREE_TO_ONE = Parts(kv_groups=(3, 1), mlp_columns=(96, 32), vocabulary_rows=(170, 86))
TWO_TO_ONES = Parts(kv_groups=(2, 1, 1), mlp_columns=(0, 0, 128), vocabulary_rows=(100, 99, 57))
OF_THREE = Parts(kv_groups=(1, 2, 1), mlp_columns=(0, 61, 67), vocabulary_rows=(1, 155, 100))
CASES: dict[str, tuple[Plan, tuple[str, ...]]] = {
    # Its gradients go to and come from a rank that holds everything.
    "3:1 beside 1, tied to a set of three": (
        plan_of(
            ((set_of((0, 1), 2, 3, 2.0, THREE_TO_ONE), replica(2, 1, 2)), 2),
            ((set_of((3, 4, 5), 4, 2, parts=TWO_TO_ONES),), 2),
        ),
        (),
    ),
    # Every rank has its own norms' gradients of its own positions only.
    "3:1, sequence parallel": (
        plan_of(((set_of((0, 1), 2, 4, 2.0, THREE_TO_ONE),), 4)),
        SEQUENCE_PARALLEL,
    ),
    "four groups over three ranks, SwiGLU": (
        plan_of(((set_of((0, 1, 2), 2, 4, 1.0, OF_THREE),), 4)),
        ("--swiglu", "--ffn-hidden-size", "128"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_follows_stock(name: str, corpus: Path) -> None:
    plan, more = CASES[name]
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", *more)
    assert_follows(plan, plan_run(plan, flags), stock_of(flags), is_gated="--swiglu" in more)
