"""Orders and placements: what Little's law asks for, near placements, and how close to the best."""

import dataclasses
import itertools
import math
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import plans
from tests.unit.made_plans import even_plan
from tests.unit.planner_cases import random_case
from zorse_megatron.plan.memory_settings import offloads_anything, recomputes_anything
from zorse_megatron.plan.plan import Halved, Replica
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace
from zorse_megatron.planner.orders import (
    InFlight,
    least_in_flight,
    littles_law,
    with_in_flight,
)
from zorse_megatron.planner.search import climb as climb_module
from zorse_megatron.planner.search.climb import Climb, climbed_from
from zorse_megatron.planner.search.orders_in_memory import in_order, uniform
from zorse_megatron.planner.search.placements import near, v_shaped, with_placement
from zorse_megatron.planner.search.plan_moves import PlanMoves
from zorse_megatron.planner.search.zorse_search import search
from zorse_megatron.schedule.micro_batch_order import Pipeline, pipeline_spans_s
from zorse_megatron.schedule.pipeline_schedules import policy_of
from zorse_megatron.schedule.samples import Boundaries


def timed(plan, forward_s=1.0, backward_s=2.0):
    groups = tuple(
        dataclasses.replace(
            group,
            replicas=tuple(
                dataclasses.replace(each, compute_s=((forward_s, backward_s, 0.0),))
                for each in group.replicas
            ),
        )
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_equal_stages_need_one_micro_batch_for_each_later_stage_and_two(stages):
    """One passes through each stage from there on; one more is computed meanwhile."""
    plan = timed(even_plan(stages, 1, 12))
    needed = littles_law(plan)
    assert [needed[stage, 0] for stage in range(stages)] == pytest.approx(
        [stages - stage + 1 for stage in range(stages)]
    )


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=6).map(
    lambda rows: tuple(dict.fromkeys(rows))
)


@given(rows=ROWS)
def test_near_placements_have_all_layers_and_groups(rows):
    num_groups = 1 + max(group for group, _ in rows)
    for found in near(rows, num_groups):
        assert sum(layers for _, layers in found) == sum(layers for _, layers in rows)
        assert {group for group, _ in found} == set(range(num_groups))
        assert all(layers > 0 for _, layers in found)
        assert all(one[0] != other[0] for one, other in pairwise(found))


@given(rows=ROWS)
def test_samples_come_back_through_a_v(rows):
    order = list(dict.fromkeys(group for group, _ in rows))
    found = v_shaped(rows)
    way = [group for group, _ in found]
    assert way[: len(order)] == order
    back = way[len(order) :]
    assert back == [group for group in order[-2::-1] if group in back]
    for group in order:
        assert sum(layers for owner, layers in found if owner == group) == sum(
            layers for owner, layers in rows if owner == group
        )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_first_chunks_leave_room_for_samples_that_come_back(stages):
    """Otherwise the replica is full of samples that need it again, and none can go on."""
    rows = v_shaped(tuple((stage, 4) for stage in range(stages)))
    plan = with_placement(even_plan(stages, 1, 24), rows)
    groups = tuple(
        dataclasses.replace(
            group,
            replicas=tuple(
                dataclasses.replace(
                    each, compute_s=((1.0, 2.0, 0.0),) * len(plan.chunks_of_group(number))
                )
                for each in group.replicas
            ),
        )
        for number, group in enumerate(plan.groups)
    )
    plan = dataclasses.replace(plan, groups=groups)
    limits = {key: InFlight(most=math.ceil(each)) for key, each in littles_law(plan).items()}
    plan = with_in_flight(plan, limits)
    pipeline = Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=False)
    assert list(pipeline.simulate()) and not pipeline.was_stuck


@given(plan=plans(max_groups=4, num_layers=8, global_batch_size=24), part=st.floats(0.5, 1.5))
def test_a_forecast_stops_only_where_the_pipeline_takes_longer(plan, part):
    ends_s = [end_s for _, end_s in pipeline_spans_s(plan).values()]
    spans_s = pipeline_spans_s(plan, part * max(ends_s))
    assert spans_s in (None, pipeline_spans_s(plan))
    assert part < 1 or spans_s is not None
    if part < 0.99 and max(ends_s) > 1:  # of seconds, not of units of work
        assert spans_s is None


def all_placements(num_groups, num_layers, most_chunks):
    """Every assignment of layers to groups with no more runs than that."""
    for owners in product(range(num_groups), repeat=num_layers):
        rows = []
        for owner in owners:
            if rows and rows[-1][0] == owner:
                rows[-1] = (owner, rows[-1][1] + 1)
            else:
                rows.append((owner, 1))
        if len(rows) <= most_chunks and len({group for group, _ in rows}) == num_groups:
            yield tuple(rows)


SPACE = SearchSpace(
    split_backward=False,
    schedules=("1f1b", "interleaved"),
    recompute=("none",),
    offload=False,
    max_micro_batch_size=4,
    effort="high",
)


@cache
def a_pipeline(seed):
    """Its inputs, with plenty of memory, and the fastest plan with several groups."""
    inputs = random_case(seed, most_gpus=3, most_layers=6)
    plenty = (10**9,) * inputs.world_size
    inputs = dataclasses.replace(inputs, capacities_bytes=plenty, space=SPACE)
    found = search(inputs, lambda progress: None).evaluations
    return inputs, next((each for each in found if len(each.plan.groups) > 1), None)


def in_flight(inputs, plan, factor, delayed=0.0):
    orders = uniform(plan, delayed > 0, factor, delayed)
    return in_order(Evaluator(inputs), plan, orders, {}, {})


def test_a_replica_is_busy_for_whole_micro_batches_and_halves():
    halved = Halved(first=1, last=2, time_of_half=0.75)
    replica = Replica(
        ranks=(0,), micro_batch_size=4, num_microbatches=6, shard_weight=1.0, halved=halved
    )
    assert replica.num_times == 3 + 6 * 0.75


@pytest.mark.slow
def test_an_order_keeps_to_the_memory_that_there_is():
    inputs, start = a_pipeline(7)
    most, least = (in_flight(inputs, start.plan, factor) for factor in (3.0, 0.01))
    pairs = list(zip(most.evaluation.peaks_bytes, least.evaluation.peaks_bytes, strict=True))
    assert any(one > other for one, other in pairs)
    between = tuple((one + 3 * other) // 4 for one, other in pairs)
    tight = dataclasses.replace(inputs, capacities_bytes=between)
    found = in_flight(tight, start.plan, 3.0)
    assert found.evaluation.fits
    assert most.iteration_s <= found.iteration_s <= least.iteration_s


@pytest.mark.slow
def test_weight_gradients_of_one_micro_batch_at_least_may_wait():
    inputs, start = a_pipeline(7)
    plan = in_flight(inputs, start.plan, 1.0, delayed=0.01).plan
    for number, group in enumerate(plan.groups):
        for index, replica in enumerate(group.replicas):
            assert replica.max_delayed_wgrad >= least_in_flight(plan, number, index)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 11])
def test_every_step_leads_to_a_plan_of_the_same_model_gpus_and_batch(seed):
    inputs, start = a_pipeline(seed)
    space = dataclasses.replace(SPACE, recompute=("none", "full"), offload=True)
    inputs = dataclasses.replace(inputs, space=space)
    orders = uniform(start.plan, False, 1.0, 0.0)
    moves = PlanMoves(Evaluator(inputs))
    found = [each.plan for each in moves.around(start.plan, orders)]
    here = {group.ranks for group in start.plan.groups}
    assert any({group.ranks for group in plan.groups} != here for plan in found)
    assert any(map(recomputes_anything, found)) and any(map(offloads_anything, found))
    for plan in found:
        assert list(problems_of(plan)) == []
        ranks = sorted(rank for group in plan.groups for rank in group.ranks)
        assert ranks == list(range(inputs.world_size))
        assert sum(chunk.num_layers for chunk in plan.chunks) == inputs.num_layers


def climb(seed, effort, splits):
    inputs, start = a_pipeline(seed)
    space = dataclasses.replace(SPACE, effort=effort, split_backward=splits)
    more = dataclasses.replace(inputs, space=space)
    return climbed_from(Evaluator(more), [start], 200_000)


climbed = cache(climb)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "is_faster"), [(0, True), (3, False), (10, True), (7, False)])
def test_climbing_again_is_never_slower(seed, is_faster):
    once, again = (climbed(seed, effort, False).iteration_s for effort in ("normal", "high"))
    assert again <= once
    assert (again < once) == is_faster


@pytest.mark.slow
def test_climbing_finds_the_same_each_time():
    assert climb(10, "high", False).plan == climbed(10, "high", False).plan


@pytest.mark.parametrize(
    ("is_short", "end_s", "climbs"),
    [(False, 0.9, [False, True]), (True, 0.9, [True]), (True, 1.1, [True, False])],
)
def test_large_plans_are_climbed_once_where_that_makes_them_faster(
    monkeypatch, is_short, end_s, climbs
):
    """With weight gradients apart first."""
    splits = []

    def climb(*_, **options):
        splits.append(options["splits"])
        same = {"in_halves": lambda best: best, "with_less_in_flight": lambda best: best}
        return SimpleNamespace(goes_on=False, **same)

    start = SimpleNamespace(iteration_s=1.0, plan=None)
    end = SimpleNamespace(iteration_s=end_s, evaluation=SimpleNamespace(iteration_s=end_s))
    monkeypatch.setattr(climb_module, "Climb", climb)
    monkeypatch.setattr(climb_module, "_ends", lambda *_: [end])
    monkeypatch.setattr(climb_module, "is_short_climb", lambda *_: is_short)
    evaluator = SimpleNamespace(inputs=SimpleNamespace(space=SearchSpace(split_backward=True)))
    assert climbed_from(evaluator, [start], 1).iteration_s == min(1.0, end_s)
    assert splits == climbs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 11])
def test_a_plan_is_never_slower_because_more_is_allowed(seed):
    """Weight gradients apart, and a second climb; micro-batches may be halved in all of them."""
    found = {
        (effort, splits): climbed(seed, effort, splits).iteration_s
        for effort, splits in itertools.product(("normal", "high"), (False, True))
    }
    assert found["high", False] <= found["normal", False]
    assert found["normal", True] <= found["normal", False]
    assert found["high", True] <= min(found["high", False], found["normal", True])


@pytest.mark.slow
def test_pipelines_far_behind_a_faster_plan_of_another_kind_are_climbed_from():
    inputs, start = a_pipeline(13)
    alone = climbed(13, "normal", False)
    assert start.iteration_s > 1.2 * alone.iteration_s
    in_breadth = dataclasses.replace(start.plan.schedule, name="breadth_first")
    faster = dataclasses.replace(
        start,
        plan=dataclasses.replace(start.plan, schedule=in_breadth),
        iteration_s=1.01 * alone.iteration_s,
    )
    found = climbed_from(Evaluator(inputs), [faster, start], 200_000)
    assert found.iteration_s == alone.iteration_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_climbing_ends_near_the_best_placement_of_all(seed):
    """From the fastest pipeline of the search, against every placement of as many chunks."""
    inputs, start = a_pipeline(seed)
    if start is None:
        return  # one group is fastest, and its layers have one place
    evaluator = Evaluator(inputs)
    climbed = climbed_from(evaluator, [start], 400_000)
    assert climbed.fits and climbed.iteration_s <= start.iteration_s
    tried = [
        in_order(evaluator, plan, uniform(plan, False, factor, 0.0), {}, {})
        for rows in all_placements(len(start.plan.groups), inputs.num_layers, 4)
        for factor in (1.5, 3.0)
        for plan in [with_placement(start.plan, rows)]
    ]
    best_s = min(each.iteration_s for each in tried if each is not None)
    assert climbed.iteration_s <= 1.03 * best_s


@pytest.mark.slow
def test_no_more_is_in_flight_than_the_iteration_needs():
    """Of three times what Little's law asks for, with memory for all of it."""
    saved_bytes = 0
    for seed in range(4):
        inputs, start = a_pipeline(seed)
        if start is None:
            continue
        evaluator = Evaluator(inputs)
        order = uniform(start.plan, False, 3.0, 0.0)
        full = in_order(evaluator, start.plan, order, {}, {}).evaluation
        less = Climb(evaluator, 1, lambda progress: None).with_less_in_flight(full)
        assert less.fits and less.iteration_s <= full.iteration_s
        saved_bytes += sum(full.peaks_bytes) - sum(less.peaks_bytes)
    assert saved_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_allowing_weight_gradients_apart_is_never_slower(seed):
    inputs = random_case(seed, most_gpus=4, most_layers=6)
    spaces = (
        dataclasses.replace(SPACE, effort="normal", split_backward=may) for may in (False, True)
    )
    without, allowed = (
        find_plan(dataclasses.replace(inputs, space=each), stock=()) for each in spaces
    )
    assert not any(group.split_backward for group in without.plan.groups)
    assert allowed.iteration_s <= without.iteration_s


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "again"), [(1, True), (7, False)])
def test_more_effort_is_never_slower_and_finds_the_same_again(seed, again):
    inputs = random_case(seed, most_gpus=3, most_layers=6)
    more = dataclasses.replace(inputs, space=dataclasses.replace(SPACE, split_backward=True))
    less = dataclasses.replace(
        more, space=dataclasses.replace(SPACE, split_backward=True, effort="normal")
    )
    first, before = (find_plan(each, stock=()) for each in (more, less))
    assert first.iteration_s <= before.iteration_s
    assert not again or first.plan == find_plan(more, stock=()).plan
    assert any("--effort high" in note for note in first.notes)
