"""On small clusters the search finds what trying everything finds.

ZORSE_OPTIMALITY_CASES is the number of random clusters, with up to 4 GPUs and 8 layers; without it
a few smaller ones are tried. Where so many plans can be faster that trying them takes too long, a
case is left undecided, and counted.
"""

import os

import pytest

from tests.unit.planner_cases import TooManyPlansError, best_by_trying, random_case
from zorse_megatron.planner.errors import NoPlanError
from zorse_megatron.planner.search import find_plan

_WANTED = os.environ.get("ZORSE_OPTIMALITY_CASES")
CASES = int(_WANTED or 24)
LARGER = {"most_gpus": 4, "most_layers": 8}
SIZE = LARGER if _WANTED else {"most_gpus": 4, "most_layers": 6}
MOST_SIMULATED = 1500


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
    assert len(undecided) <= 0.1 * CASES, undecided
    assert max(ratios.values()) <= 1.05, missed
    assert len(missed) <= 0.05 * CASES, missed


@pytest.mark.parametrize("seed", [56, 116, 257])
def test_a_group_of_unequal_gpus_is_found_where_it_is_best(seed):
    """These were missed by 7 to 10 % while its slowest GPU was taken to fill the pipeline."""
    assert excess(seed, LARGER) == 1.0
