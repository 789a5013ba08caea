"""What would take far longer than ten minutes to plan is refused, with all that is too large."""

import dataclasses

import pytest

from tests.unit.planner_cases import random_case
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import MAX_GPUS, MAX_LAYERS
from zorse_megatron.planner.outcome import PlannerInputError


def test_refuses_clusters_and_models_beyond_the_limits() -> None:
    inputs = random_case(5, most_layers=6)
    kinds = inputs.kinds[:1] * (MAX_GPUS + 1)
    large = dataclasses.replace(inputs, kinds=kinds, num_layers=MAX_LAYERS + 1)
    with pytest.raises(PlannerInputError) as refused:
        find_plan(large)
    assert [problem.where for problem in refused.value.problems] == ["the cluster", "the model"]
    with pytest.raises(PlannerInputError, match="at most 512"):
        find_plan(dataclasses.replace(inputs, num_layers=MAX_LAYERS + 1))
