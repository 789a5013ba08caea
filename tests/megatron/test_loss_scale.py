"""fp16 under a plan overflows where stock does by default: where its loss is a mean.

The reference is a stock single process without --calculate-per-token-loss. With all tokens counting
16-bit gradients are stock's but for the order of sums: the same steps are skipped, and losses agree
within one rounding to the type. Summed in fp32, each micro-batch's gradients may overflow alone, as
in stock with micro-batches of other sizes.
"""

from pathlib import Path

import pytest

from tests.megatron.comparison import BASE_FLAGS, Recorded, plan_run, run_recorded, stock_run
from tests.megatron.plans import LAYOUTS, TWO_BY_TWO, computing_in, sending_in, with_settings
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.plan import Schedule

SAVED, STEPS = 4, 6
PER_TOKEN = "--calculate-per-token-loss"
DEFAULT_FLAGS = tuple(flag for flag in BASE_FLAGS if flag != PER_TOKEN)
# From this loss scale the first steps overflow, and one after the first that does not.
DYNAMIC = ("--fp16", "--initial-loss-scale", "1048576", "--hysteresis", "1")
# From this one gradients of sums overflow, of means not.
LOW = ("--fp16", "--initial-loss-scale", "2048", "--hysteresis", "1")
CONSTANT = ("--fp16", "--loss-scale", "4096")
IN_FP32 = ("--accumulate-allreduce-grads-in-fp32",)
FP16_ROUNDING, BF16_ROUNDING = 2**-11, 2**-8

PLANS = {
    "1f1b": LAYOUTS["2|1|2"],
    "interleaved": with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved")),
}


def flags(corpus: Path, *more: str, steps: int = STEPS) -> tuple[str, ...]:
    # No documents are left for an evaluation.
    return (
        *DEFAULT_FLAGS,
        *("--train-iters", str(steps), "--data-path", str(corpus), "--split", "100,0,0"),
        *TOKENIZER_FLAGS,
        *more,
    )


def scales(run: Recorded) -> list[tuple[int, float]]:
    """Of each step: whether it was skipped, and the loss scale after it."""
    return [(step["skipped"], step["loss_scale"]) for step in run.steps]


def assert_follows(run: Recorded, stock: Recorded, rounding: float) -> None:
    assert scales(run) == scales(stock)
    assert run.losses == pytest.approx(stock.losses, rel=rounding)
    norms = [(mine, its) for mine, its in zip(run.grad_norms, stock.grad_norms, strict=True) if its]
    assert len(norms) == len([skipped for skipped, _ in scales(stock) if not skipped])
    assert [mine for mine, _ in norms] == pytest.approx([its for _, its in norms], rel=rounding)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("1f1b", ("--seq-length", "21")),  # 168 tokens, far from a power of two
        ("interleaved", ("--seq-length", "21")),
        ("interleaved", IN_FP32),
    ],
)
def test_skips_the_steps_that_stock_skips(
    name: str, more: tuple[str, ...], corpus_prefix: Path
) -> None:
    command = flags(corpus_prefix, *DYNAMIC, *more)
    stock = stock_run(command)
    skipped = [skipped for skipped, _ in scales(stock)]
    assert 0 < sum(skipped) < STEPS, "the test needs both"
    assert_follows(plan_run(PLANS[name], command), stock, FP16_ROUNDING)


def test_a_constant_scale_trains_from_the_first_step(corpus_prefix: Path) -> None:
    command = flags(corpus_prefix, *CONSTANT, steps=2)
    run = plan_run(PLANS["interleaved"], command)
    assert_follows(run, stock_run(command), FP16_ROUNDING)
    assert not any(step["skipped"] for step in run.steps)


def test_groups_of_several_types_with_the_scale_of_fp16(corpus_prefix: Path) -> None:
    """At 4,096 gradients of sums over 256 tokens would overflow in the groups that send fp16."""
    plan = computing_in(LAYOUTS["2|1|2"], "bf16", "fp16", "fp32")
    plan = sending_in(plan, "fp16", None, "bf16")
    run = plan_run(plan, flags(corpus_prefix, "--bf16", "--loss-scale", "4096", steps=2))
    assert not any(step["skipped"] for step in run.steps)
    stock = stock_run(flags(corpus_prefix, "--bf16", steps=2))
    assert run.losses == pytest.approx(stock.losses, rel=BF16_ROUNDING)


def test_a_scale_goes_on_in_stock_and_back(corpus_prefix: Path, tmp_path: Path) -> None:
    """Who resumes from the other's checkpoint skips no step that the other did not."""

    def plan(*more: str) -> Recorded:
        return plan_run(LAYOUTS["2|1"], flags(corpus_prefix, *DYNAMIC, *more))

    def stock(*more: str) -> Recorded:
        return run_recorded(flags(corpus_prefix, *DYNAMIC, *more), 1)

    for kind, train, resume in (("plan", plan, stock), ("stock", stock, plan)):
        where = str(tmp_path / kind)
        whole = train("--save", where, "--save-interval", str(SAVED))
        rest = resume("--load", where, "--ckpt-step", str(SAVED))
        assert len(rest.steps) == STEPS - SAVED
        assert scales(rest) == scales(whole)[SAVED:]
        assert rest.losses == pytest.approx(whole.losses[SAVED:], rel=FP16_ROUNDING)


def test_who_asks_for_sums_gets_the_scale_of_sums(corpus_prefix: Path) -> None:
    """As stock with the same flag, and told so."""
    command = flags(corpus_prefix, *LOW, PER_TOKEN)
    run, stock = plan_run(LAYOUTS["2|1"], command), stock_run(command)
    assert_follows(run, stock, FP16_ROUNDING)
    of_means = stock_run(flags(corpus_prefix, *LOW))
    assert run.steps[-1]["loss_scale"] < of_means.steps[-1]["loss_scale"]
    assert not run.steps[-1]["skipped"]
    assert "the loss scale is for gradients of a sum" in run.outputs[0]


@pytest.mark.parametrize(
    ("dtypes", "large", "named"),
    [
        (("fp16", "fp16"), 0, "rank 1: the output of layer 0 (layers"),
        (("fp16", "fp16"), 3, "rank 0: the output of layer 3 (layers"),
        (("fp32", "fp16"), 0, "rank 0: the output of layer 2, received from group 0 (layers"),
        (("fp16", "fp32"), 3, None),
    ],
)
def test_a_layer_that_leaves_the_range_is_named_once(
    dtypes: tuple[ComputeDtype, ...], large: int, named: str | None, corpus_prefix: Path
) -> None:
    """From the second of skipped steps on; where fp32 holds the values, steps are not skipped."""
    run = plan_run(
        computing_in(LAYOUTS["1|2"], *dtypes),
        flags(corpus_prefix, *LOW, steps=4),
        entry="tests.megatron.planted_entry",
        env={"ZORSE_TEST_PLANT": f"large {large}"},
    )
    lines = [line for output in run.outputs for line in output.splitlines() if "exceeds" in line]
    skipped = [step["skipped"] for step in run.steps]
    if named is None:
        assert not lines
        assert not all(skipped)
    else:
        assert all(skipped)
        assert sum(named in line for line in lines) == 1
        assert "iteration 2 is skipped" in lines[0]
        assert '"compute_dtype": "fp32"' in lines[0]
