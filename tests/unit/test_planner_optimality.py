"""On small clusters the search finds what trying everything finds, and all that it says holds.

ZORSE_OPTIMALITY_CASES is the number of random clusters, with up to 6 GPUs and 12 layers, or as
many as ZORSE_OPTIMALITY_SIZE says, such as 4x8; without it a few smaller ones are tried. A case
with more plans that can be faster than are tried is undecided, and counts as missed.
"""

import os
import re
from functools import cache

import pytest

from tests.unit.planner_cases import (
    TooManyPlansError,
    best_by_trying,
    fits,
    random_case,
    simulated,
)
from zorse_megatron.plan.plan_file import dump_plan, parse_plan
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.describe_plan import describe_plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.outcome import NoPlanError, Outcome

pytestmark = pytest.mark.slow

_WANTED = os.environ.get("ZORSE_OPTIMALITY_CASES")
CASES = int(_WANTED or 20)  # one of which may be missed
GPUS, LAYERS = os.environ.get("ZORSE_OPTIMALITY_SIZE", "6x12" if _WANTED else "4x6").split("x")
SIZE = (int(GPUS), int(LAYERS))
MOST_SIMULATED = 20_000


def case(seed, size):
    most_gpus, most_layers = size
    return random_case(seed, most_gpus=most_gpus, most_layers=most_layers)


@cache
def found(seed, size) -> Outcome | None:
    """None where nothing fits."""
    try:
        return find_plan(case(seed, size), stock=())
    except NoPlanError:
        return None


def excess(seed, size):
    """How much slower the plan is than the best one, as a ratio; 1 where it is 2 % at most."""
    inputs, outcome = case(seed, size), found(seed, size)
    if outcome is None:
        assert best_by_trying(inputs, below_s=1e9, most_simulated=MOST_SIMULATED) is None
        return 1.0
    below_s = outcome.iteration_s / 1.02
    best_s = best_by_trying(inputs, below_s=below_s, most_simulated=MOST_SIMULATED)
    return 1.0 if best_s is None else outcome.iteration_s / best_s


@pytest.mark.timeout(7200)
def test_plans_are_within_two_percent_of_the_best():
    ratios, undecided = {}, []
    for seed in range(CASES):
        try:
            ratios[seed] = excess(seed, SIZE)
        except TooManyPlansError:
            undecided.append(seed)
    missed = {seed: ratio for seed, ratio in ratios.items() if ratio > 1.0}
    print(f"undecided {undecided}, not within 2 %: {missed}")
    assert max(ratios.values()) <= 1.05, missed
    assert len(missed) + len(undecided) <= 0.05 * CASES, (missed, undecided)


@pytest.mark.parametrize("seed", [56, 116, 257])
def test_a_group_of_unequal_gpus_is_found_where_it_is_best(seed):
    """These were missed by 7 to 10 % while its slowest GPU was taken to fill the pipeline."""
    assert excess(seed, (4, 8)) == 1.0


@pytest.mark.parametrize("seed", range(CASES))
def test_every_accepted_plan_fits(seed):
    inputs, outcome = case(seed, SIZE), found(seed, SIZE)
    if outcome is None:
        return
    assert parse_plan(dump_plan(outcome.plan).encode()) == outcome.plan
    assert fits(inputs, simulated(inputs, outcome.plan))
    assert [each.iteration_s for each in outcome.rejected] == sorted(
        each.iteration_s for each in outcome.rejected
    )
    assert outcome.bound_s == lower_bound_s(inputs) <= outcome.iteration_s
    # What is told differs in more than layers, sizes and recomputation, also from what is taken.
    told = [describe_plan(outcome.plan, inputs.kinds), *(each.what for each in outcome.rejected)]
    bare = [re.sub(r"\d+ layers|, recompute \w+( \d+)?", "", words) for words in told]
    assert len(set(bare)) == len(bare)
