"""The first promise for groups with several chunks: gathered and released, recomputed, offloaded.

As in `test_exactness`, the reference is a stock single-process run of the same command, with the
same tolerances. What only moves memory is held to more: it must not change a bit.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    LAYOUTS,
    NUM_LAYERS,
    chunked_plan,
    plan_run,
    replica,
    stock_run,
)
from tests.megatron.test_exactness import (
    MASKED,
    NO_CLIP,
    UNTIED,
    assert_equal_runs,
    assert_tied_copies_are_equal,
    flags_for,
)
from tests.strategies import lowerable_plans
from zorse_megatron.schema.plan import Offload, Plan, Recompute, Schedule

PAIR = (replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0))
ALONE = (replica(2, 4, 2),)


def breadth_first(**parameters: Any) -> Schedule:
    return Schedule(name="breadth_first", parameters=parameters)


def with_settings(
    plan: Plan, *recompute: Recompute | None, schedule: Schedule | None = None, **offload: bool
) -> Plan:
    """`recompute`: one for all groups, or one for each; `offload`: what all groups offload."""
    each = recompute * len(plan.groups) if len(recompute) == 1 else recompute
    groups = [
        dataclasses.replace(
            group,
            recompute=each[number] if each else None,
            offload=Offload(**offload) if offload else None,
        )
        for number, group in enumerate(plan.groups)
    ]
    schedule = schedule or plan.schedule
    return dataclasses.replace(plan, groups=tuple(groups), schedule=schedule)


TWO_BY_TWO = chunked_plan([PAIR, ALONE], [(0, 1), (1, 1), (0, 1), (1, 1)])
LAYERED = chunked_plan(
    [(replica(0, 1, 5, 2.0), replica(1, 1, 0, 1.0), replica(2, 3, 1, 0.0))], [(0, 1)] * 4
)
# Group 0 has both ends of the model; a replica computes nothing, another one owns nothing.
BOTH_ENDS = chunked_plan(
    [
        (replica(0, 1, 3, 3.0), replica(3, 1, 5, 0.0)),
        (replica(2, 4, 2), replica(1, 1, 0, 2.0)),
    ],
    [(0, 1), (1, 2), (0, 1)],
)
# Chunks of a group that follow one another, and groups with different numbers of chunks.
NEIGHBOURS = chunked_plan(
    [(replica(2, 2, 4),), (replica(0, 1, 4), replica(1, 4, 1, 2.5))],
    [(0, 1), (0, 1), (1, 1), (0, 1)],
)
FULL, SELECTIVE, NONE = (Recompute(mode=mode) for mode in ("full", "selective", "none"))
FIRST_LAYER = Recompute(mode="full", num_layers=1)

PLANS = {
    "breadth first": TWO_BY_TWO,
    "interleaved": with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved")),
    "layered accumulation": LAYERED,
    "both ends in one group": BOTH_ENDS,
    "neighbouring chunks": NEIGHBOURS,
    "resident": with_settings(NEIGHBOURS, schedule=breadth_first(parameters="resident")),
    "per micro-batch": with_settings(
        BOTH_ENDS, schedule=breadth_first(parameters="per_micro_batch")
    ),
    "all in the host": with_settings(
        BOTH_ENDS, FULL, parameters=True, optimizer_state=True, activations=True
    ),
    "layered, all in the host": with_settings(
        LAYERED, FULL, parameters=True, optimizer_state=True, activations=True
    ),
    "1f1b, other recomputation in each group": with_settings(
        LAYOUTS["2|1|2"], FIRST_LAYER, SELECTIVE, NONE, optimizer_state=True
    ),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_follows_stock(name: str, tied: bool, corpus: Path) -> None:
    flags = flags_for(corpus, *(() if tied else UNTIED), *MASKED, "--clip-grad", "0.5")
    run = plan_run(PLANS[name], flags)
    assert_equal_runs(run, stock_run(flags))
    if tied:
        assert_tied_copies_are_equal(run)


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
    "first layers again": {"recompute": (FIRST_LAYER, SELECTIVE)},
}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_moving_memory_changes_no_bit(precision: str, corpus: Path) -> None:
    """Against the same plan with everything resident; clipping is off, whose norm sums by shard."""
    chunks = [(0, 1), (1, 1), (0, 1), (1, 1)]
    plan = chunked_plan([PAIR, ALONE], chunks)
    more = () if precision == "fp32" else (f"--{precision}",)
    if precision == "fp16":
        # The first step overflows and is skipped.
        more += ("--initial-loss-scale", "65536", "--hysteresis", "1")
    flags = flags_for(corpus, *UNTIED, *MASKED, *NO_CLIP, *more, steps=6)
    resident = plan_run(with_settings(plan, schedule=breadth_first(parameters="resident")), flags)
    for name, move in MOVES.items():
        options: dict[str, Any] = dict(move)
        moved = plan_run(with_settings(plan, *options.pop("recompute", ()), **options), flags)
        assert moved.losses == resident.losses, name
        for parameter, copies in moved.final.items():
            expected = resident.final[parameter][0]
            assert all(torch.equal(copy, expected) for copy in copies), f"{name}: {parameter}"


@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(plan=lowerable_plans(4, 3, num_layers=NUM_LAYERS, global_batch_size=GLOBAL_BATCH_SIZE))
def test_any_plan_follows_stock(plan: Plan, corpus: Path) -> None:
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", steps=8)
    assert_equal_runs(plan_run(plan, flags), stock_run(flags))
