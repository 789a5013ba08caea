"""Sets whose ranks hold unequal parts of each layer follow a stock single process.

KV groups, columns of the MLP and rows of the vocabulary are cut apart from each other, in parts
that do not divide anything; a rank may hold none of any of them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.megatron.checkpoint_jobs import read_checkpoint
from tests.megatron.comparison import STEPS, plan_of, plan_run, replica
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.set_plans import set_of
from tests.megatron.test_exactness import MASKED, flags_for
from tests.megatron.test_tensor_parallel import SEQUENCE_PARALLEL, assert_follows, stock_of
from zorse_megatron.plan.plan import Parts, Plan, Recompute

MAX_RELATIVE_DIFFERENCE = 1e-4


def recomputing(mode: Literal["selective", "full"], plan: Plan) -> Plan:
    groups = (replace(group, recompute=Recompute(mode=mode)) for group in plan.groups)
    return replace(plan, groups=tuple(groups))


THREE_TO_ONE = Parts(kv_groups=(3, 1), mlp_columns=(96, 32), vocabulary_rows=(170, 86))
SOME_HOLD_NONE = Parts(kv_groups=(0, 3, 1), mlp_columns=(0, 0, 128), vocabulary_rows=(256, 0, 0))
ALL_OR_NONE = Parts(kv_groups=(4, 0), mlp_columns=(96, 32), vocabulary_rows=(0, 256))
OF_THREE = Parts(kv_groups=(0, 3, 1), mlp_columns=(0, 61, 67), vocabulary_rows=(0, 156, 100))
SWIGLU = (
    *("--swiglu", "--ffn-hidden-size", "128", "--qk-layernorm"),
    *("--position-embedding-type", "rope"),
)
CASES: dict[str, tuple[Plan, tuple[str, ...]]] = {
    # Its gradients go to and come from a rank that holds everything. One of three holds no layer.
    "3:1 beside 1, tied to a set of three": (
        plan_of(
            ((set_of((0, 1), 2, 3, 2.0, THREE_TO_ONE), replica(2, 1, 2)), 2),
            ((set_of((3, 4, 5), 4, 2, parts=SOME_HOLD_NONE),), 2),
        ),
        (),
    ),
    # Every rank has its own norms' gradients of its own positions only.
    "all to none, sequence parallel": (
        recomputing("full", plan_of(((set_of((0, 1), 2, 4, 2.0, ALL_OR_NONE),), 4))),
        SEQUENCE_PARALLEL,
    ),
    "four groups over three ranks, SwiGLU": (
        recomputing("selective", plan_of(((set_of((0, 1, 2), 2, 4, 1.0, OF_THREE),), 4))),
        SWIGLU,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_follows_stock(name: str, corpus: Path, tmp_path: Path) -> None:
    """And of a gated MLP the checkpoint, of parameters and optimizer, is that of stock."""
    plan, more = CASES[name]
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", *more)
    saves = more == SWIGLU
    every = ("--save-interval", str(STEPS))
    saved = [("--save", str(tmp_path / by), *every) if saves else () for by in ("plan", "stock")]
    run, stock = plan_run(plan, (*flags, *saved[0])), stock_of((*flags, *saved[1]))
    assert_follows(plan, run, stock, is_gated="--swiglu" in more)
    if saves:
        (unlike,) = run_megatron_ranks(1, unlike_tensors, tmp_path / "plan", tmp_path / "stock")
        assert unlike == []


def unlike_tensors(mine: Path, stock: Path) -> list[str]:
    """What is in only one of two checkpoints, or of other shape or value in the two."""
    folder = f"iter_{STEPS:07d}"
    found, expected = (
        {k: v for k, v in read_checkpoint(root / folder)[0].items() if isinstance(v, torch.Tensor)}
        for root in (mine, stock)
    )
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in expected) > 10
    return [
        key
        for key in sorted(found.keys() | expected.keys())
        if key not in found
        or key not in expected
        or found[key].shape != expected[key].shape
        or not (found[key] - expected[key]).norm() <= MAX_RELATIVE_DIFFERENCE * expected[key].norm()
    ]
