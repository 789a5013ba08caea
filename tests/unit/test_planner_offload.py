"""State in the host is on the GPU in the step: what fits in closed form fits in the simulator.

And activations in the host pay where the host link keeps up with slow GPUs.
"""

import dataclasses

import pytest

from tests.unit.planner_cases import random_case, simulated
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.plan.plan import Offload, Recompute
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace, make_inputs
from zorse_megatron.schedule import shards

# Shards are cut at multiples of 64 elements, and so are pieces here; of 12 bytes of state each.
GRAIN = 64
GRAIN_BYTES = GRAIN * 12


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
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", GRAIN)
    inputs, estimate = least_that_fits(seed, schedule, num_chunks)
    estimator = Estimator(inputs)
    plan = Builder(inputs, estimator.cost_model, estimator.in_flight).plan(estimate)
    assert plan is not None
    (group,) = plan.groups
    assert group.offload == Offload(optimizer_state=True)
    result = simulated(inputs, plan)
    for peak, capacity in zip(result.peak_memory_bytes, inputs.capacities_bytes, strict=True):
        assert peak <= capacity + min(num_chunks, 2) * GRAIN_BYTES


@pytest.mark.slow
def test_activations_in_the_host_are_faster_than_making_them_again():
    """Two T4 have no room for what eight layers keep of 32 samples; their host links keep up."""
    cluster = parse_cluster(b"nodes: [{gpus: 2 x T4}]")
    model = dataclasses.replace(MODELS["llama-3b"], num_layers=8, seq_length=1024)
    inputs = make_inputs(cluster, model, None, global_batch_size=32, dtype="float16")
    without = find_plan(inputs)
    space = dataclasses.replace(inputs.space, offload_activations=True)
    outcome = find_plan(dataclasses.replace(inputs, space=space))
    own = settings_by_rank(outcome.plan).values()
    assert all(each.offload == Offload(activations=True) for each in own)
    assert all(each.recompute != Recompute(mode="full") for each in own)
    assert outcome.iteration_s < 0.9 * without.iteration_s
