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

from tests.megatron import small_pieces
from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    MANY_STEPS,
    NUM_LAYERS,
    STEPS,
    plan_run,
    stock_run,
)
from tests.megatron.ministages import (
    BOTH_ENDS,
    FIRST_LAYER,
    FULL,
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
from zorse_megatron.schema.plan.plan import Plan, Schedule

CANONICAL = ("breadth first", "all in the host")
PLANS = {
    "breadth first": TWO_BY_TWO,
    "interleaved, each replica its own": each_its_own(
        with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved"))
    ),
    "layered accumulation": LAYERED,
    "both ends in one group": BOTH_ENDS,
    "neighbouring chunks": NEIGHBOURS,
    "resident": with_settings(NEIGHBOURS, schedule=breadth_first(parameters="resident")),
    "per micro-batch": with_settings(
        BOTH_ENDS, schedule=breadth_first(parameters="per_micro_batch")
    ),
    "all in the host": in_the_host(BOTH_ENDS),
    "layered, all in the host": in_the_host(LAYERED),
    "1f1b, other recomputation in each group and replica": each_its_own(
        with_settings(LAYOUTS["2|1|2"], FIRST_LAYER, SELECTIVE, NONE, optimizer_state=True)
    ),
}


# The first have the ends of the model in two groups, the last one in one.
UNTIED_PLANS = ("breadth first", "interleaved, each replica its own", "per micro-batch")


@pytest.mark.parametrize(
    ("name", "tied"), [*((name, True) for name in PLANS), *((name, False) for name in UNTIED_PLANS)]
)
def test_follows_stock(name: str, tied: bool, corpus: Path) -> None:
    steps = MANY_STEPS if tied and name in CANONICAL else STEPS
    more = () if tied else UNTIED
    flags = flags_for(corpus, *more, *MASKED, "--clip-grad", "0.5", steps=steps)
    run = plan_run(PLANS[name], flags)
    assert_equal_runs(run, stock_run(flags))
    if tied:
        assert_tied_copies_are_equal(run)


def test_evaluates_between_steps(corpus: Path) -> None:
    """All in the host, where an evaluation finds it and leaves it."""
    often = ("--eval-interval", "2", "--eval-iters", "3")
    flags = flags_for(corpus, *UNTIED, *MASKED, *often, steps=4)
    run, stock = plan_run(in_the_host(BOTH_ENDS), flags), stock_run(flags)
    assert_equal_runs(run, stock)
    expected = evaluations(stock.outputs)
    assert len(expected) == 4
    assert evaluations(run.outputs) == pytest.approx(expected, abs=MAX_LOSS_DIFFERENCE)


MOVES = {
    "per pass": {},
    "per micro-batch": {"schedule": breadth_first(parameters="per_micro_batch")},
    "parameters in the host": {"parameters": True},
    "optimizer state in the host": {"optimizer_state": True},
    "all in the host": {
        "recompute": (FULL,),
        "parameters": True,
        "optimizer_state": True,
        "activations": True,
    },
    "each replica its own": {},
    "first layers again": {"recompute": (FIRST_LAYER, SELECTIVE)},
}
# Pieces begin and end within parameters.
PIECES = {"env": {small_pieces.NAME: "1000"}}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_moving_memory_changes_no_bit(precision: str, corpus: Path) -> None:
    """Against the same plan with everything resident; clipping is off, whose norm sums by shard."""
    more: tuple[str, ...] = () if precision == "fp32" else (f"--{precision}",)
    if precision == "fp16":
        # The first step overflows and is skipped.
        more += ("--initial-loss-scale", "65536", "--hysteresis", "1")
    flags = flags_for(corpus, *UNTIED, *MASKED, *NO_CLIP, *more)
    resident = plan_run(
        with_settings(TWO_BY_TWO, schedule=breadth_first(parameters="resident")), flags
    )
    # What is moved does not depend on the precision, but that there are main parameters does.
    moves = MOVES if precision == "fp32" else {"all in the host": MOVES["all in the host"]}
    cases = [(name, move, {}) for name, move in moves.items()]
    cases.append(("in small pieces", MOVES["all in the host"], PIECES))
    for name, move, run_options in cases:
        options: dict[str, Any] = dict(move)
        plan = with_settings(TWO_BY_TWO, *options.pop("recompute", ()), **options)
        if name == "each replica its own":
            plan = each_its_own(plan, parameters=True)
        moved = plan_run(plan, flags, **run_options)
        assert moved.losses == resident.losses, name
        for parameter, copies in moved.final.items():
            expected = resident.final[parameter][0]
            assert all(torch.equal(copy, expected) for copy in copies), f"{name}: {parameter}"


def test_the_fused_update_clips_as_stock_does_in_pieces_too(corpus: Path) -> None:
    """It multiplies by the clip coefficient where it steps, wherever the state comes from."""
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5")
    plan = with_settings(BOTH_ENDS, optimizer_state=True)
    run = plan_run(plan, [*flags, "--zorse-update", "fused"], **PIECES)
    assert "shards are updated in one pass each" in run.outputs[0]
    assert_equal_runs(run, stock_run(flags))


def test_state_in_the_host_counts_steps_as_fused_optimizers_do(corpus: Path) -> None:
    """They count per group, in every call; with state in the host there are many calls."""
    flags = flags_for(corpus, *UNTIED, *NO_CLIP, steps=3)
    fused = "tests.megatron.fused_entry"
    moved = plan_run(with_settings(BOTH_ENDS, optimizer_state=True), flags, entry=fused)
    resident = plan_run(BOTH_ENDS, flags, entry=fused)
    assert_equal_runs(resident, stock_run(flags))
    for parameter, copies in moved.final.items():
        assert torch.equal(copies[0], resident.final[parameter][0]), parameter


@settings(
    max_examples=8,
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
