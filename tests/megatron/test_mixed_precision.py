"""bf16 and fp16 with masked tokens: losses are a stock single process's within one rounding.

Rounding alone makes 16-bit runs drift apart, in stock's own layouts too: by how much is a sample of
noise, so no two such distances are compared here. Losses of all steps must agree within one
rounding to the type, which is far less than what a lost micro-batch or a skipped step changes.

All commands have --calculate-per-token-loss: with masked tokens stock's default weighs
micro-batches, not tokens. `test_loss_scale` compares with that default.
"""

from pathlib import Path

import pytest
import torch

from tests.megatron.comparison import BASE_FLAGS, Recorded, plan_run, stock_run
from tests.megatron.plans import LAYOUTS, plan_of, replica, tp_replica
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.plan.plan import TpShards

STEPS = 4
FP16_ROUNDING, BF16_ROUNDING = 2**-11, 2**-8
BF16 = ("--bf16",)
# From this loss scale the first steps overflow and must be skipped by all groups.
FP16 = ("--fp16", "--initial-loss-scale", "4096", "--hysteresis", "1")

SINGLE_SAMPLES = {
    "2|1|2": plan_of(
        ((replica(0, 1, 6, 3.0), replica(1, 1, 2)), 1),
        ((replica(2, 1, 8),), 2),
        ((replica(3, 1, 5), replica(4, 1, 3, 0.3)), 1),
    ),
    "3|2": plan_of(
        ((replica(0, 1, 3, 3.0), replica(1, 1, 3, 0.0), replica(2, 1, 2)), 3),
        ((replica(3, 1, 7), replica(4, 1, 1, 0.3)), 1),
    ),
}
CASES = {
    "bf16, one sample: 3|2": (BF16, SINGLE_SAMPLES["3|2"], BF16_ROUNDING),
    "fp16, one sample: 2|1|2": (FP16, SINGLE_SAMPLES["2|1|2"], FP16_ROUNDING),
    "fp16, other sizes: 5, one idle": (FP16, LAYOUTS["5, one idle"], FP16_ROUNDING),
}


def flags(corpus: Path, precision: tuple[str, ...], seed: int, steps: int, *more: str) -> list[str]:
    return [
        *BASE_FLAGS,
        *("--train-iters", str(steps), "--data-path", str(corpus), "--split", "90,5,5"),
        *TOKENIZER_FLAGS,
        *("--eod-mask-loss", "--clip-grad", "0.5", "--seed", str(seed)),
        *precision,
        *more,
    ]


def assert_follows(run: Recorded, stock: Recorded, rounding: float) -> None:
    assert scales(run) == scales(stock)
    assert run.losses == pytest.approx(stock.losses, rel=rounding)


def scales(run: Recorded) -> list[tuple[int, float]]:
    """Of each step: whether it was skipped, and the loss scale after it."""
    return [(step["skipped"], step["loss_scale"]) for step in run.steps]


@pytest.mark.parametrize("name", CASES)
def test_follows_stock_within_rounding(name: str, corpus: Path) -> None:
    precision, plan, rounding = CASES[name]
    command = flags(corpus, precision, 1, STEPS)
    run = plan_run(plan, command)
    assert_follows(run, stock_run(tuple(command)), rounding)
    if precision is FP16:
        skipped = [step["skipped"] for step in run.steps]
        assert 0 < sum(skipped) < len(skipped), "the test needs both"
    for parameter, copies in run.final.items():
        assert all(torch.equal(copy, copies[0]) for copy in copies), parameter
        assert bool(copies[0].isfinite().all()), parameter


# A TP group of two ranks, one of which has no KV group and all rows, and TP groups of two and three
# ranks.
TWO = TpShards(kv_groups=(1, 3), mlp_columns=(50, 78), vocabulary_rows=(99, 157))
THREE = TpShards(kv_groups=(1, 1, 2), mlp_columns=(40, 41, 47), vocabulary_rows=(1, 200, 55))
SOME_HOLD_NONE = TpShards(kv_groups=(0, 4), mlp_columns=(50, 78), vocabulary_rows=(256, 0))
TP_CASES = {
    "bf16": (
        BF16,
        plan_of(((tp_replica((0, 1), 2, 4, tp_shards=SOME_HOLD_NONE),), 4)),
        BF16_ROUNDING,
    ),
    "fp16": (
        FP16,
        plan_of(
            ((tp_replica((3, 4), 2, 4, tp_shards=TWO),), 2),
            ((tp_replica((0, 1, 2), 4, 2, tp_shards=THREE),), 2),
        ),
        FP16_ROUNDING,
    ),
}


@pytest.mark.parametrize("name", TP_CASES)
def test_tp_groups_follow_stock_within_rounding(name: str, corpus: Path) -> None:
    """Steps that overflow are skipped on all ranks together.

    In fp16 rank 0 is in a TP group of three: with the two groups, more than there are ranks.
    """
    precision, plan, rounding = TP_CASES[name]
    command = flags(corpus, precision, 1, STEPS)
    run = plan_run(plan, [*command, "--use-distributed-optimizer"])
    assert_follows(run, stock_run(tuple(command)), rounding)
