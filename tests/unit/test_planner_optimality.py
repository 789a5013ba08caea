"""On small clusters the search finds what trying everything finds.

ZORSE_OPTIMALITY_CASES is the number of random clusters, with up to 6 GPUs and 12 layers, or as
many as ZORSE_OPTIMALITY_SIZE says, such as 4x8; without it a few smaller ones are tried. A case
with more plans that can be faster than are tried is undecided, and counts as missed.
"""

import os

import pytest

from tests.unit.planner_cases import TooManyPlansError, best_by_trying, random_case
from zorse_megatron.planner.errors import NoPlanError
from zorse_megatron.planner.find_plan import find_plan

_WANTED = os.environ.get("ZORSE_OPTIMALITY_CASES")
CASES = int(_WANTED or 12)
GPUS, LAYERS = os.environ.get("ZORSE_OPTIMALITY_SIZE", "6x12" if _WANTED else "4x6").split("x")
SIZE = {"most_gpus": int(GPUS), "most_layers": int(LAYERS)}
MOST_SIMULATED = 20_000


def excess(seed, size):
    """How much slower the plan is than the best one, as a ratio; 1 where it is 2 % at most."""
    inputs = random_case(seed, **size)
    try:
        found_s = find_plan(inputs).iteration_s
    except NoPlanError:
        assert best_by_trying(inputs, below_s=1e9, most_simulated=MOST_SIMULATED) is None
        return 1.0
    best_s = best_by_trying(inputs, below_s=found_s / 1.02, most_simulated=MOST_SIMULATED)
    return 1.0 if best_s is None else found_s / best_s


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
    assert excess(seed, {"most_gpus": 4, "most_layers": 8}) == 1.0
