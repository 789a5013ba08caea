"""Batches that grow: a plan follows a stock single process, which has the same schedule.

In a run, and from a checkpoint that was saved between two sizes.
"""

from pathlib import Path

import pytest

from tests.megatron.comparison import (
    BASE_FLAGS,
    MASKED,
    UNTIED,
    assert_follows,
    plan_run,
    stock_run,
)
from tests.megatron.plans import plan_of, replica, tp_replica
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.test_loss_scale import DYNAMIC, FP16_ROUNDING, IN_FP32, PER_TOKEN, scales

# Micro-batches of 1 and 2 make all the sizes, of 4 only the last one.
PLAN = plan_of(((replica(0, 1, 6, 3.0), replica(1, 2, 3)), 1), ((tp_replica((2, 3), 4, 3),), 3))
ONE_BY_ONE = plan_of(((replica(0, 1, 8, 3.0), replica(1, 1, 4)), 1), ((replica(2, 1, 12),), 3))
SIZES = (3, 6, 6, 12, 12)
# In tokens; the second size begins within a batch of the first.
SCHEDULE = ("--step-batch-size-schedule", "0:3 50:6 400:12", "--train-samples", str(sum(SIZES)))
OF_ITERATIONS = ("--global-batch-size", "--lr-warmup-iters", "--lr-decay-iters")
IN_SAMPLES = ("--lr-warmup-samples", "9", "--lr-decay-samples", "300")


def command(corpus: Path, *more: str) -> tuple[str, ...]:
    flags = list(BASE_FLAGS)
    for flag in OF_ITERATIONS:
        at = flags.index(flag)
        del flags[at : at + 2]
    data = ("--data-path", str(corpus), "--split", "100,0,0")
    return (*flags, *SCHEDULE, *IN_SAMPLES, *data, *TOKENIZER_FLAGS, *more)


def test_follows_stock_and_resumes(corpus: Path, tmp_path: Path) -> None:
    flags = command(corpus, *MASKED)
    save = ("--save", str(tmp_path), "--save-interval", "100")  # it saves where the size changes
    stock, run = stock_run(flags), plan_run(PLAN, [*flags, *save])
    assert len(run.steps) == len(SIZES)
    assert_follows(run, stock)
    resumed = plan_run(PLAN, [*flags, "--load", str(tmp_path), "--ckpt-step", "3"])
    assert resumed.losses == pytest.approx(run.losses[3:], abs=1e-5)


def test_fp16_losses_are_divided_by_the_tokens_of_each_batch(corpus_prefix: Path) -> None:
    """Gradients are summed in fp32, so that only backwards overflow."""
    more = (*DYNAMIC, *IN_FP32, *UNTIED)
    flags = tuple(flag for flag in command(corpus_prefix, *more) if flag != PER_TOKEN)
    stock, run = stock_run(flags), plan_run(ONE_BY_ONE, flags)
    assert 0 < sum(skipped for skipped, _ in scales(stock)) < len(SIZES), "the test needs both"
    assert scales(run) == scales(stock)
    assert run.losses == pytest.approx(stock.losses, rel=FP16_ROUNDING)
