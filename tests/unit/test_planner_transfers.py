"""Plans say how long messages are on their way, where the order depends on it."""

import dataclasses

import pytest

from tests.unit.test_planner_search import lab
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.planner.closed_form.candidate import Candidate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("little_effort")]
REGIONS = """
name: regions
nodes:
  - {name: west, gpus: 1 x A100-40, nics: 100 Gb/s, region: west}
  - {name: east, gpus: 1 x A100-40, nics: 100 Gb/s, region: east}
between_regions:
  - {regions: [west, east], bandwidth: 5 Gb/s, latency: 60 ms}
"""


def pipelines(schedule: str) -> SearchSpace:
    return SearchSpace(schedules=(schedule,), recompute=("none",), max_micro_batch_size=1)


def without_transfers(plan: Plan) -> Plan:
    chunks = tuple(dataclasses.replace(chunk, transfer=None) for chunk in plan.chunks)
    return dataclasses.replace(plan, chunks=chunks)


def found(cluster: str, schedule: str) -> tuple[Inputs, Plan]:
    inputs = lab(cluster, batch=64, space=pipelines(schedule))
    return inputs, find_plan(inputs).plan


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_transfer_between_regions_is_that_of_the_network(schedule):
    inputs, plan = found(REGIONS, schedule)
    transfers = [chunk.transfer for chunk in plan.chunks]
    assert transfers[-1] is None and transfers[0] is not None
    assert transfers[0].latency_s == pytest.approx(0.06, rel=0.01)
    sample_s = inputs.memory.boundary_bytes(1) * 8 / 5e9
    assert transfers[0].s_per_sample == pytest.approx(sample_s, rel=0.01)


def test_there_is_none_under_breadth_first():
    _, plan = found(REGIONS, "breadth_first")
    assert plan == without_transfers(plan)


@pytest.mark.parametrize("first", [1, 11, 21])
def test_there_is_none_between_chunks_of_one_group(first):
    """A group with one of the 22 layers is left out of a turn."""
    inputs = lab(REGIONS, batch=8, space=pipelines("interleaved"))
    evaluator = Evaluator(inputs)
    device_groups = tuple(DeviceGroups(inputs).of((rank,)) for rank in (0, 1))
    candidate = Candidate(
        device_groups=device_groups, levels=(1, 1), schedule="interleaved", num_chunks=2
    )
    estimate = evaluator.estimator.estimate(candidate, (first, 22 - first))
    assert estimate is not None
    plan = evaluator.builder.plan(estimate)
    assert plan is not None and any(chunk.transfer for chunk in plan.chunks)
    assert list(problems_of(plan)) == []
