"""bf16 and fp16: a plan is no further from a stock single process than stock's own variants are.

16-bit runs drift apart by rounding alone, so the measure is stock itself: for each of three seeds
the largest difference of a loss over 20 steps, to a stock single process with micro-batches of one
sample. All runs of a seed start from one checkpoint, because stock's layouts initialise
differently.

- A plan whose micro-batches have one sample, too: compared with stock PP=2, DP=2.
- A plan with other micro-batch sizes rounds other sums, as stock does with another
  `--micro-batch-size`: compared with the widest of these stock variants.
- Groups that compute in bf16, fp16 and fp32: no further from fp32 than stock in bf16 all through.

The figures are printed (`pytest -s`).
"""

from pathlib import Path
from statistics import mean

import pytest
import torch

from tests.megatron.comparison import (
    BASE_FLAGS,
    LAYOUTS,
    STEPS,
    Recorded,
    computing_in,
    plan_of,
    plan_run,
    replica,
    run_recorded,
)
from tests.megatron.small_run import TOKENIZER_FLAGS

SEEDS = (1, 2, 3)
PP2_DP2 = ("--pipeline-model-parallel-size", "2")

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
THREE_TYPES = computing_in(SINGLE_SAMPLES["2|1|2"], "bf16", "fp16", "fp32")
# So low that nothing overflows.
LOW_SCALE = ("--bf16", "--initial-loss-scale", "16")
OTHER_SIZES = {name: LAYOUTS[name] for name in ("2|1|2", "5, one idle")}


def flags(corpus: Path, precision: tuple[str, ...], seed: int, steps: int, *more: str) -> list[str]:
    return [
        *BASE_FLAGS,
        *("--train-iters", str(steps), "--data-path", str(corpus), "--split", "90,5,5"),
        *TOKENIZER_FLAGS,
        *("--eod-mask-loss", "--clip-grad", "0.5", "--seed", str(seed)),
        *precision,
        *more,
    ]


def loss_distance(run: Recorded, reference: Recorded) -> float:
    """Largest difference of a loss over all steps."""
    return max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))


def distance(run: Recorded, reference: Recorded) -> float:
    """`loss_distance`; skipped steps and loss scale must be equal."""
    for mine, stock in zip(run.steps, reference.steps, strict=True):
        assert (mine["skipped"], mine["loss_scale"]) == (stock["skipped"], stock["loss_scale"])
    return loss_distance(run, reference)


@pytest.mark.parametrize(
    "precision",
    # From this loss scale the first steps overflow and must be skipped by all groups.
    [("--bf16",), ("--fp16", "--initial-loss-scale", "4096", "--hysteresis", "1")],
    ids=["bf16", "fp16"],
)
def test_drifts_no_more_than_stock(
    precision: tuple[str, ...], corpus: Path, tmp_path: Path
) -> None:
    stock_layout: list[float] = []
    stock_sizes: list[float] = []
    ours: dict[str, list[float]] = {}
    from_fp32: dict[str, list[float]] = {"stock": [], "three types": []}
    for seed in SEEDS:
        directory = str(tmp_path / str(seed))
        run_recorded(
            flags(corpus, precision, seed, 1, "--save", directory, "--save-interval", "1"), 1
        )
        start = ("--load", directory, "--finetune", "--no-load-optim", "--no-load-rng")
        command = flags(corpus, precision, seed, STEPS, *start)
        reference = run_recorded(command, 1)
        stock_layout.append(distance(run_recorded([*command, *PP2_DP2], 4), reference))
        other = run_recorded([*command, "--micro-batch-size", "2"], 1)
        stock_sizes.append(distance(other, reference))
        for kind, plans in (("one sample", SINGLE_SAMPLES), ("other sizes", OTHER_SIZES)):
            for name, plan in plans.items():
                run = plan_run(plan, command)
                ours.setdefault(f"{kind}: {name}", []).append(distance(run, reference))
        if precision == ("--bf16",):
            exact = run_recorded(flags(corpus, (), seed, STEPS, *start), 1)
            mixed = plan_run(THREE_TYPES, flags(corpus, LOW_SCALE, seed, STEPS, *start))
            from_fp32["stock"].append(loss_distance(reference, exact))
            from_fp32["three types"].append(loss_distance(mixed, exact))
    print(f"\n{precision[0]}: stock PP=2,DP=2 {stock_layout}, other micro-batches {stock_sizes}")
    print(*(f"  plan, {name}: {values}" for name, values in ours.items()), sep="\n")
    print(f"  from fp32: {from_fp32}")
    if precision == ("--bf16",):
        assert mean(from_fp32["three types"]) <= mean(from_fp32["stock"])
    for name, values in ours.items():
        if name.startswith("one sample"):
            assert mean(values) <= mean(stock_layout), name
        else:
            assert mean(values) <= max(stock_layout + stock_sizes), name


def test_fp16_skips_an_overflow_in_all_groups_at_once(corpus: Path) -> None:
    precision = ("--fp16", "--initial-loss-scale", "65536", "--hysteresis", "1")
    run = plan_run(SINGLE_SAMPLES["2|1|2"], flags(corpus, precision, 1, 12))
    skipped = [step["skipped"] for step in run.steps]
    assert 0 < sum(skipped) < len(skipped), "the test needs both"
    for name, copies in run.final.items():
        assert all(torch.equal(copy, copies[0]) for copy in copies), name
        assert bool(copies[0].isfinite().all()), name
