"""Mixture of experts under any plan: losses, norms, weights and biases are one process's."""

from pathlib import Path

import pytest

from tests.megatron.comparison import (
    LLAMA,
    UNTIED,
    assert_equal_steps,
    assert_follows,
    flags_for,
    for_one_process,
    plan_run,
    stock_run,
)
from tests.megatron.plans import (
    FULL,
    LAYOUTS,
    TWO_BY_TWO,
    chunked_plan,
    in_the_host,
    plan_of,
    replica,
    with_settings,
)
from tests.megatron.test_checkpoints import RUNS, Saved, assert_same_rest
from tests.megatron.test_moving import STEPS, assert_runs, both_runs
from zorse_megatron.plan.plan import Plan

EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48"),
    *("--moe-router-dtype", "fp64"),
)
BALANCED = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.02")
BY_SAMPLE = ("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.02")
BIASED = (
    *("--moe-router-load-balancing-type", "none", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.02"),
)
MODEL = (*LLAMA, *EXPERTS)
BREADTH_FIRST = chunked_plan(
    [(replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0)), (replica(2, 4, 2),)],
    [(0, 1), (1, 2), (0, 1)],
)
ROWS: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "aux_loss": (LAYOUTS["3|2"], (*MODEL, *BALANCED, "--moe-z-loss-coeff", "0.01")),
    "seq_aux_loss": (LAYOUTS["2|1|2"], (*MODEL, *BY_SAMPLE)),
    "bias": (LAYOUTS["2|3, idle at the end"], (*MODEL, *BIASED)),
    "bias, recomputed": (with_settings(BREADTH_FIRST, FULL), (*MODEL, *BIASED, *UNTIED)),
    "in the host": (in_the_host(BREADTH_FIRST), (*MODEL, *BALANCED)),
}


@pytest.mark.parametrize("name", ROWS)
def test_follows_one_process(name: str, corpus: Path) -> None:
    plan, more = ROWS[name]
    flags = flags_for(corpus, *more)
    assert_follows(plan_run(plan, flags), stock_run(for_one_process(flags)))


SPREAD = ("--expert-model-parallel-size", "2")
RUNS["stock EP=2"] = (SPREAD, 2)


@pytest.mark.parametrize(("by", "then"), [("1|3|1", "stock"), ("stock", "2x2 in the host")])
def test_resumes(by: str, then: str, corpus: Path) -> None:
    saved = Saved(corpus)
    directory, uninterrupted = saved.by(by, *MODEL, *BIASED)
    assert_same_rest(saved.resume(then, directory, *MODEL, *BIASED), uninterrupted)


@pytest.mark.parametrize(("by", "then"), [("1|3|1", "stock EP=2"), ("stock EP=2", "1|2")])
def test_weights_cross_to_experts_on_several_ranks(by: str, then: str, corpus: Path) -> None:
    """Of the optimizer stock has two there, and reads of no other number."""
    saved, flags = Saved(corpus), (*MODEL, *BIASED, "--no-load-optim")
    directory, _ = saved.by(by, *MODEL, *BIASED)
    alone = saved.resume("stock", directory, *flags)
    assert_equal_steps(saved.resume(then, directory, *flags), alone)


def test_moves(corpus: Path, tmp_path: Path) -> None:
    flags = [*Saved(corpus).flags(*MODEL, *BIASED), "--train-iters", str(STEPS)]
    runs = both_runs(in_the_host(TWO_BY_TWO), LAYOUTS["1|2"], tmp_path, flags)
    assert_runs(runs, TWO_BY_TWO.world_size)
