"""What waits in the host, and how much is recomputed: closed form, simulator, plans."""

import dataclasses
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.planner_cases import random_case, simulated
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.memory_settings import ranks_that_offload
from zorse_megatron.plan.plan import ModelFingerprint, Offload
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form import stage_memory
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroups,
    MemorySettings,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace, make_inputs
from zorse_megatron.planner.inputs.tensor_parallel_members import TpGroup, with_tp_groups
from zorse_megatron.planner.simulate_plan import NodeHostMemory, extended, host_needs
from zorse_megatron.schedule import shards
from zorse_megatron.schedule.lower import refuse_unsupported

# Shards are cut at multiples of 64 elements, and so are pieces here.
GRAIN = 64
SPACE = SearchSpace(
    split_backward=False,
    schedules=("breadth_first",),
    recompute=("none", "full"),
    offload_activations=True,
)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    with patch.object(shards, "STATE_PIECE_ELEMENTS", GRAIN):
        yield


def short_of_memory(seed, room, host_room=None):
    """A few layers on GPUs whose memory is `room` of what the training state takes on each."""
    inputs = random_case(seed, most_gpus=4)
    inputs = replace(inputs, num_layers=12, model=ModelFingerprint(num_layers=12))
    whole = 18 * (12 * inputs.memory.layer_parameters() + 600)
    one = int(room * whole / inputs.world_size)
    host = None if host_room is None else int(host_room * whole / inputs.world_size)
    return replace(
        inputs,
        space=SPACE,
        capacities_bytes=tuple(one + one * (rank % 2) // 3 for rank in range(inputs.world_size)),
        host_bytes=(host,) * inputs.world_size,
    )


def together(inputs, num_chunks, size=1):
    """One group of all GPUs."""
    return Candidate(
        device_groups=(DeviceGroups(inputs).of(tuple(range(inputs.world_size))),),
        levels=(size,),
        schedule="breadth_first",
        num_chunks=num_chunks,
    )


def every_setting(stage):
    """Of all GPUs alike."""
    # Of three chunks or fewer all parameters are on the GPU in turn.
    host = product((False, True) if stage.num_chunks > 3 else (False,), (False, True))
    for (parameters, state), recomputed in product(host, range(stage.num_layers + 1)):
        make = partial(
            MemorySettings,
            mode="full" if recomputed else "none",
            recomputed=recomputed,
            offload_parameters=parameters,
            offload_state=state,
        )
        yield make()
        yield make(offload_activations=True)


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2000),
    room=st.floats(0.1, 1.5),
    num_chunks=st.sampled_from([2, 4, 6, 12]),
    host_room=st.sampled_from([None, 0.3, 0.8, 1.5]),
)
def test_no_setting_that_fits_takes_less_time(seed, room, num_chunks, host_room):
    """With as many recomputed layers of every chunk, and copies that the host link has time for."""
    inputs = short_of_memory(seed, room, host_room)
    model = Estimator(inputs).cost_model
    group = DeviceGroups(inputs).of(tuple(range(inputs.world_size)))
    position = StagePosition(
        is_first=True,
        is_last=True,
        in_flight_limit=0.0,
        schedule="breadth_first",
        num_chunks=num_chunks,
    )
    stage = Stage(group, 12, (1,) * len(group.gpu_classes), position)
    counts, times = model.counts(stage), []
    for way in every_setting(stage):
        alike = stage.alike(way)
        if way.recomputed % num_chunks or (
            way.offload_activations and not model.to_try.copies_in_time(stage, way)
        ):
            continue
        fits = model.memory.free_bytes(stage, counts, alike) >= 0
        if fits and model.host.holds(stage, counts, alike):
            cost = model.with_settings(stage, alike, 0.0)
            times.append(cost.busy_s + cost.step_s)
    cost = model.cost(stage)
    if cost is None:
        assert not times
        return
    counts = model.counts(stage, cost.settings)
    assert model.memory.free_bytes(stage, counts, cost.settings) >= 0
    assert model.host.holds(stage, counts, cost.settings)
    assert not times or cost.busy_s + cost.step_s <= min(times)


def evaluated(inputs, num_chunks):
    """The plan in closed form, with as much left free as the simulator then asks for."""
    evaluator = Evaluator(inputs)
    estimator = evaluator.estimator
    reserve = 0
    for _ in range(8):
        candidate = replace(together(inputs, num_chunks), reserves=(reserve,))
        found = estimator.best(candidate)
        evaluation = evaluator.evaluate(found[0]) if found else None
        if evaluation is None or evaluation.fits_gpus:
            return evaluation
        reserve += max(evaluation.overflow_bytes) + 64
    return None


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2000), room=st.floats(0.15, 0.6))
def test_plans_that_offload_parameters_fit_and_can_be_executed(seed, room):
    inputs = short_of_memory(seed, room)
    evaluation = evaluated(inputs, 12)
    if evaluation is None:
        return
    refuse_unsupported(evaluation.plan)
    for peak, capacity in zip(evaluation.peaks_bytes, inputs.capacities_bytes, strict=True):
        assert peak <= capacity


def least_room(seed):
    """The least memory of GPUs, in hundredths, with which a plan fits, and the plan."""
    for hundredths in range(15, 120):
        evaluation = evaluated(short_of_memory(seed, hundredths / 100), 12)
        if evaluation is not None and evaluation.fits:
            return hundredths, evaluation
    raise AssertionError("nothing fits")


@pytest.mark.parametrize("seed", range(3))
def test_parameters_in_the_host_make_room(seed):
    """At least for 2 of 18 bytes of what 9 of 12 chunks hold, where the GPUs have 7/6 of a room."""
    found, evaluation = least_room(seed)
    assert ranks_that_offload(evaluation.plan, "parameters") == set(
        range(len(evaluation.peaks_bytes))
    )
    with patch.object(stage_memory, "_CHUNKS_ON_GPU", 99):
        without, other = least_room(seed)
    assert not ranks_that_offload(other.plan, "parameters")
    assert without - found >= int(100 * 2 / 18 * 9 / 12 * 6 / 7)


@pytest.mark.parametrize("seed", range(4))
def test_host_memory_of_the_final_plan_is_checked(seed):
    """With a byte less than what it takes, the simulator's word is that it does not fit."""
    _, evaluation = least_room(seed)
    inputs = least_inputs = short_of_memory(seed, 1.0)
    needs = host_needs(inputs, Evaluator(inputs).simulated(evaluation.plan))
    assert {name for need in needs for name, _ in need.by_category_bytes} >= {
        "parameters",
        "optimizer state",
    }
    for need, spare in product(needs, (0, -1)):
        (at,) = [n for n, node in enumerate(inputs.spec.nodes) if node.name == need.node]
        ranks = inputs.spec.ranks_of(at)
        parts = [10**12] * inputs.world_size
        for rank in ranks:
            parts[rank] = 0
        parts[ranks[0]] = need.num_bytes + spare
        least_inputs = replace(inputs, host_bytes=tuple(parts))
        again = Evaluator(least_inputs).evaluate_plan(evaluation.plan)
        assert again is not None and again.fits_gpus
        assert again.fits == (spare == 0)


def test_host_memory_of_a_batch_that_is_extrapolated():
    def needs(activations):
        rows = (("optimizer state", 500), ("activations", activations))
        return [NodeHostMemory(node="n0", by_category_bytes=rows, has_bytes=1000)]

    (grown,) = extended(needs(100), needs(200), 5.0)
    assert grown.by_category_bytes == (("optimizer state", 500), ("activations", 500))
    (same,) = extended(needs(200), needs(200), 5.0)
    assert same.by_category_bytes == (("optimizer state", 500), ("activations", 200))


@pytest.mark.parametrize(
    ("tp_layout", "may_offload"),
    [
        ((TpGroup(ranks=(0, 1)), TpGroup(ranks=(2, 3))), True),
        ((TpGroup(ranks=(0, 1)),), False),
    ],
)
def test_parameters_stay_where_replicas_are_cut_differently(tp_layout, may_offload):
    """The runtime refuses it of a TP group beside a single GPU."""
    cluster = parse_cluster(b"nodes: [{gpus: 4 x T4, link: PCIe 10 GB/s}]")
    model = replace(MODELS["llama-1b"], num_layers=8)
    alone = make_inputs(cluster, model, None, global_batch_size=4, dtype="float16")
    inputs = with_tp_groups(alone, tp_layout)
    group = DeviceGroups(inputs).of(tuple(range(inputs.world_size)))
    position = StagePosition(
        is_first=True, is_last=True, in_flight_limit=0.0, schedule="breadth_first", num_chunks=8
    )
    stage = Stage(group, 8, (1,) * len(group.gpu_classes), position)
    hosts = Estimator(inputs).cost_model.to_try.hosts(stage)
    assert any(each.offload_parameters for each in hosts) == may_offload


@pytest.mark.parametrize("seed", range(4))
def test_the_closed_form_needs_what_the_simulator_finds(seed):
    """On all hosts together. Blocks are powers of two, so a shard that differs a little from the
    mean may take one twice or half as large."""
    _, evaluation = least_room(seed)
    inputs = short_of_memory(seed, 1.0)
    needs = host_needs(inputs, Evaluator(inputs).simulated(evaluation.plan))
    (stage,), (cost,) = evaluation.estimate.stages, evaluation.estimate.costs
    model = Estimator(inputs).cost_model
    counts = model.counts(stage, cost.settings)
    needed = model.host.needed_bytes(stage, counts, cost.settings)
    classes = stage.device_group.gpu_classes
    expected = sum(len(c.ranks) * each for c, each in zip(classes, needed, strict=True))
    found = sum(need.num_bytes for need in needs)
    assert expected / 2 <= found <= 2 * expected


# State and activations.

# Shards are cut at multiples of 64 elements, and so are pieces here; of 12 bytes of state each.
STATE_GRAIN = 64
STATE_GRAIN_BYTES = STATE_GRAIN * 12


def least_that_fits(seed: int, schedule: str, num_chunks: int) -> tuple[Inputs, Estimate]:
    """One group on GPUs of two sizes, with little more memory than the closed form asks for."""
    case = random_case(seed)
    whole_bytes = 18 * (case.num_layers * 640 + 600)
    space = SearchSpace(schedules=(schedule,), recompute=("none",), max_micro_batch_size=4)
    for tenths in range(2, 60):
        one = tenths * whole_bytes // (10 * case.world_size)
        capacities = tuple(one + rank % 2 * 3 * one // 10 for rank in range(case.world_size))
        inputs = dataclasses.replace(case, capacities_bytes=capacities, space=space)
        candidate = Candidate(
            device_groups=(DeviceGroups(inputs).of(tuple(range(inputs.world_size))),),
            levels=(2,),
            schedule=schedule,
            num_chunks=num_chunks,
        )
        found = Estimator(inputs).best(candidate)
        if found:
            return inputs, found[0]
    raise AssertionError("nothing fits")


@pytest.mark.parametrize(
    ("schedule", "num_chunks"),
    [("1f1b", 1), ("interleaved", 2), ("breadth_first", 1), ("breadth_first", 3)],
)
@pytest.mark.parametrize("seed", range(6))
def test_state_in_the_host_fits_in_the_step(seed, schedule, num_chunks, monkeypatch):
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", STATE_GRAIN)
    inputs, estimate = least_that_fits(seed, schedule, num_chunks)
    estimator = Estimator(inputs)
    plan = Builder(estimator).plan(estimate)
    assert plan is not None
    (group,) = plan.groups
    assert group.offload == Offload(optimizer_state=True)
    result = simulated(inputs, plan)
    for peak, capacity in zip(result.peak_memory_bytes, inputs.capacities_bytes, strict=True):
        assert peak <= capacity + min(num_chunks, 2) * STATE_GRAIN_BYTES
