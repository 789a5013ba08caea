"""The planner names regions where groups span them, and samples stay there."""

from dataclasses import replace

import pytest

from tests.unit.planner_cases import simulated
from tests.unit.test_planner_search import lab
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner import evaluate as evaluator_module
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form.candidate import Candidate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search.finish_plan import with_best_levels
from zorse_megatron.planner.search.zorse_search import SearchResult
from zorse_megatron.schedule.actions import SENDS
from zorse_megatron.schedule.lower import lower_plan

pytestmark = pytest.mark.slow
REGIONS = """
nodes:
  - {name: west, gpus: 2 x A100-40, nics: 100 Gb/s, region: west}
  - {name: east, gpus: 2 x A100-40, nics: 100 Gb/s, region: east}
between_regions:
  - {regions: [west, east], bandwidth: 1 Gb/s, latency: 60 ms}
"""


def planned(inputs: Inputs, groups: list[tuple[int, ...]], sizes: tuple[int, ...]) -> Plan:
    """The plan of groups of these ranks, each group with one micro-batch size."""
    estimator, device_groups = Estimator(inputs), DeviceGroups(inputs)
    candidate = Candidate(
        device_groups=tuple(device_groups.of(ranks) for ranks in groups), levels=sizes
    )
    (estimate,) = estimator.best(candidate)
    plan = Builder(inputs, estimator.cost_model, estimator.in_flight).plan(estimate)
    assert plan is not None
    return plan


def regions_of(plan: Plan) -> list[list[str | None]]:
    return [[replica.region for replica in group.replicas] for group in plan.groups]


def test_only_plans_with_a_group_in_two_regions_name_them() -> None:
    inputs = lab(REGIONS, batch=64)
    assert regions_of(planned(inputs, [(0, 2), (1, 3)], (1, 1))) == [["west", "east"]] * 2
    assert regions_of(planned(inputs, [(0, 1), (2, 3)], (1, 1))) == [[None, None]] * 2


def test_no_activation_crosses_between_regions_with_equal_shares() -> None:
    """Micro-batches of 1 and 2 samples: in their order of time half of the samples would."""
    inputs = lab(REGIONS, batch=64)
    plan = planned(inputs, [(0, 2), (1, 3)], (1, 2))
    nowhere = replace(
        plan,
        groups=tuple(
            replace(group, replicas=tuple(replace(r, region=None) for r in group.replicas))
            for group in plan.groups
        ),
    )
    assert crossing(inputs, plan) == 0
    assert crossing(inputs, nowhere) == 64  # 32 activations, and as many gradients
    assert simulated(inputs, plan).iteration_s < simulated(inputs, nowhere).iteration_s


def crossing(inputs: Inputs, plan: Plan) -> int:
    """Samples of all messages from one region to the other."""
    region = [inputs.spec.nodes[inputs.spec.node_of(rank)].region for rank in range(4)]
    actions = [
        (rank, action)
        for rank, found in enumerate(lower_plan(plan).ranks)
        for action in found
        if action.kind in SENDS
    ]
    return sum(
        action.samples[1] - action.samples[0]
        for rank, action in actions
        if action.samples and action.peer is not None and region[rank] != region[action.peer]
    )


def test_a_long_batch_is_not_extrapolated_from_what_collectives_hide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One group in both regions: with few samples its sums over the link take longest."""
    monkeypatch.setattr(evaluator_module, "MOST_COMPUTATIONS", 100)
    inputs = lab(REGIONS.replace("1 Gb/s", "20 Gb/s"), batch=1024)
    estimator = Estimator(inputs)
    candidate = Candidate(
        device_groups=(DeviceGroups(inputs).of((0, 1, 2, 3)),),
        levels=(1,),
        schedule="breadth_first",
        num_chunks=4,
    )
    (estimate,) = estimator.best(candidate)
    found = Evaluator(inputs, estimator).evaluate(estimate)
    assert found is not None
    assert found.iteration_s == pytest.approx(simulated(inputs, found.plan).iteration_s, rel=0.02)


def test_groups_in_several_regions_sum_in_two_levels_where_that_is_faster() -> None:
    """Two GPUs of each region: half of a buffer crosses in place of three quarters."""
    inputs = lab(REGIONS, batch=64)
    both = planned(inputs, [(0, 1, 2, 3)], (1,))
    assert both.groups[0].hierarchical
    ring = replace(both, groups=(replace(both.groups[0], hierarchical=None),))
    assert simulated(inputs, both).iteration_s < simulated(inputs, ring).iteration_s
    assert not any(each.hierarchical for each in planned(inputs, [(0, 1), (2, 3)], (1, 1)).groups)
    space = replace(inputs.space, hierarchical=False)
    assert planned(replace(inputs, space=space), [(0, 1, 2, 3)], (1,)) == ring


def test_the_other_way_is_tried_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the closed form had it wrong."""
    inputs = lab(REGIONS, batch=64)
    plan = planned(inputs, [(0, 1, 2, 3)], (1,))
    ring = replace(plan, groups=(replace(plan.groups[0], hierarchical=None),))
    evaluator = Evaluator(inputs, Estimator(inputs))
    found, slower = evaluator.evaluate_plan(plan), evaluator.evaluate_plan(ring)
    assert found is not None and slower is not None
    assert with_best_levels(evaluator, slower).plan == plan
    assert with_best_levels(evaluator, found).plan == plan
    cheaper = replace(slower, iteration_s=found.iteration_s / 2)
    monkeypatch.setattr(evaluator, "evaluate_plan", lambda _: cheaper)
    assert with_best_levels(evaluator, found) == cheaper


def test_baselines_have_rings_only() -> None:
    plan = find_plan(lab(REGIONS, batch=64), strategy="cephalo").plan
    assert not any(group.hierarchical for group in plan.groups)
    assert {each.region for each in plan.groups[0].replicas} == {"west", "east"}


@pytest.mark.parametrize("hierarchical", [True, False])
def test_plans_with_rings_are_searched_for_beside_one_in_two_levels(
    hierarchical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second search finds a faster one, which the first one has left out."""
    inputs = lab(REGIONS, batch=64)
    groups = [(0, 1, 2, 3)] if hierarchical else [(0, 1), (2, 3)]
    plan = planned(inputs, groups, (1,) * len(groups))
    evaluator = Evaluator(inputs, Estimator(inputs))
    first = evaluator.evaluate_plan(plan)
    assert first is not None
    second = replace(first, iteration_s=first.iteration_s / 2)
    searched = []

    def search_with_sets(each: Inputs, _progress: object) -> SearchResult:
        searched.append(each.space.hierarchical)
        considered = SearchStats(groupings=1, estimated=2, simulated=3)
        found = first if each.space.hierarchical else second
        return SearchResult(evaluations=[found], considered=considered)

    monkeypatch.setattr(find_plan_module, "search_with_sets", search_with_sets)
    outcome = find_plan(inputs, stock=())  # a layout of stock's may be faster than both
    assert searched == ([True, False] if hierarchical else [True])
    assert outcome.iteration_s == (second if hierarchical else first).iteration_s
    assert outcome.considered.estimated == (4 if hierarchical else 2)
    assert any("two levels" in note for note in outcome.notes) == hierarchical
