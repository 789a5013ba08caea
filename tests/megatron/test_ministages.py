"""The first promise for groups with several chunks: gathered and released, recomputed, offloaded.

As in `test_exactness`, the reference is a stock single-process run of the same command, with the
same tolerances. What only moves memory is held to more: it must not change a bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.megatron import small_pieces
from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    NUM_LAYERS,
    Recorded,
    computing_in,
    plan_run,
    stock_run,
)
from tests.megatron.ministages import (
    BOTH_ENDS,
    FIRST_LAYER,
    LAYERED,
    NEIGHBOURS,
    NONE,
    SELECTIVE,
    TWO_BY_TWO,
    breadth_first,
    each_its_own,
    in_the_host,
    with_settings,
)
from tests.megatron.test_exactness import (
    MASKED,
    MAX_LOSS_DIFFERENCE,
    NO_CLIP,
    UNTIED,
    assert_equal_runs,
    assert_tied_copies_are_equal,
    evaluations,
    flags_for,
)
from tests.strategies import lowerable_plans
from zorse_megatron.plan.plan import Plan, Schedule

PLANS = {
    "interleaved, each replica its own": each_its_own(
        with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved"))
    ),
    "neighbouring chunks": NEIGHBOURS,
    "per micro-batch": with_settings(
        BOTH_ENDS, schedule=breadth_first(parameters="per_micro_batch")
    ),
    "all in the host": in_the_host(BOTH_ENDS),
    "layered, all in the host": in_the_host(LAYERED),
    "1f1b, other recomputation in each group and replica": each_its_own(
        with_settings(LAYOUTS["2|1|2"], FIRST_LAYER, SELECTIVE, NONE, optimizer_state=True)
    ),
}


# With the ends of the model in two groups; `test_evaluates_between_steps` has them in one.
UNTIED_PLANS = ("interleaved, each replica its own",)


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in PLANS), *((name, False) for name in UNTIED_PLANS)]
)
def test_follows_stock(name: str, tied: bool, corpus: Path) -> None:
    more = () if tied else UNTIED
    flags = flags_for(corpus, *more, *MASKED, "--clip-grad", "0.5")
    run = plan_run(PLANS[name], flags)
    assert_equal_runs(run, stock_run(flags))
    if tied:
        assert_tied_copies_are_equal(run)


def test_evaluates_between_steps(corpus: Path) -> None:
    """All in the host, where an evaluation finds it and leaves it."""
    often = ("--eval-interval", "2", "--eval-iters", "2")
    flags = flags_for(corpus, *UNTIED, *MASKED, *often)
    run, stock = plan_run(in_the_host(BOTH_ENDS), flags), stock_run(flags)
    assert_equal_runs(run, stock)
    expected = evaluations(stock.outputs)
    assert len(expected) == 3
    assert evaluations(run.outputs) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)


# Pieces begin and end within parameters.
PIECES = {"env": {small_pieces.NAME: "1000"}}
RESIDENT = with_settings(TWO_BY_TWO, schedule=breadth_first(parameters="resident"))
MOVES: dict[str, tuple[Plan, dict[str, Any]]] = {
    "per micro-batch": (
        with_settings(
            TWO_BY_TWO, FIRST_LAYER, SELECTIVE, schedule=breadth_first(parameters="per_micro_batch")
        ),
        {},
    ),
    "each replica its own": (each_its_own(TWO_BY_TWO, parameters=True), {}),
    "all in the host, in small pieces": (in_the_host(TWO_BY_TWO), PIECES),
}


def assert_same_bits(run: Recorded, other: Recorded, name: str) -> None:
    assert run.losses == other.losses, name
    for parameter, copies in run.final.items():
        expected = other.final[parameter][0]
        assert all(torch.equal(copy, expected) for copy in copies), f"{name}: {parameter}"


def test_moving_memory_changes_no_bit(corpus: Path) -> None:
    """Against the same plan with everything resident; clipping is off, whose norm sums by shard."""
    flags = flags_for(corpus, *UNTIED, *MASKED, *NO_CLIP)
    resident = plan_run(RESIDENT, flags)
    for name, (plan, options) in MOVES.items():
        assert_same_bits(plan_run(plan, flags, **options), resident, name)


def test_moving_memory_changes_no_bit_of_main_parameters(corpus: Path) -> None:
    """One group in fp16, one in bf16; the first step overflows in fp16 and is skipped."""
    scale = ("--bf16", "--initial-loss-scale", "16384", "--hysteresis", "1")
    # The first step that is not skipped changes weights too.
    more = (*NO_CLIP, *scale, "--lr-warmup-iters", "0")
    flags = flags_for(corpus, *UNTIED, *MASKED, *more, steps=6)
    types = ("fp16", "bf16")
    resident = plan_run(computing_in(RESIDENT, *types), flags)
    skipped = [step["skipped"] for step in resident.steps]
    assert skipped[0] and sum(skipped) < len(skipped) - 1, "the test needs both"
    moved = plan_run(computing_in(in_the_host(TWO_BY_TWO), *types), flags, **PIECES)
    assert_same_bits(moved, resident, "all in the host, in small pieces")


def test_the_fused_update_clips_as_stock_does_in_pieces_too(corpus: Path) -> None:
    """It multiplies by the clip coefficient where it steps, wherever the state comes from."""
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5")
    plan = with_settings(BOTH_ENDS, optimizer_state=True)
    run = plan_run(plan, [*flags, "--zorse-update", "fused"], **PIECES)
    assert "shards are updated in one pass each" in run.outputs[0]
    assert_equal_runs(run, stock_run(flags))


def test_state_in_the_host_counts_steps_as_fused_optimizers_do(corpus: Path) -> None:
    """They count per group, in every call; with state in the host there are many calls."""
    flags = flags_for(corpus, *UNTIED, *NO_CLIP)
    plan = with_settings(TWO_BY_TWO, optimizer_state=True)
    assert_equal_runs(plan_run(plan, flags, entry="tests.megatron.fused_entry"), stock_run(flags))


@settings(
    max_examples=examples(6),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(
    plan=lowerable_plans(4, 3, num_layers=NUM_LAYERS, global_batch_size=GLOBAL_BATCH_SIZE),
    tied=st.booleans(),
)
def test_any_plan_follows_stock(plan: Plan, tied: bool, corpus: Path) -> None:
    more = () if tied else UNTIED
    flags = flags_for(corpus, *more, *MASKED, "--clip-grad", "0.5")
    assert_equal_runs(plan_run(plan, flags), stock_run(flags))
