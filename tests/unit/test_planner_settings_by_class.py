"""GPU classes of one group recompute differently where that is faster."""

from dataclasses import dataclass, replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.topologies import node
from tests.unit.planner_cases import CaseCompute, fits, random_case, simulated
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import Topology
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form.candidate import Candidate
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroups,
    MemorySettings,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.schedule.lower import refuse_unsupported


@dataclass(frozen=True, kw_only=True)
class SlowAttention(CaseCompute):
    """Core attention is a third of a layer."""

    def recompute_s(self, kind, micro_batch_size, mode):
        whole_s = super().recompute_s(kind, micro_batch_size, "full")
        return {"none": 0.0, "selective": whole_s / 3, "full": whole_s}[mode]


def mixed_case(seed, *, layers=6):
    """Inputs of a small cluster of several kinds, whose plans may recompute core attention too."""
    inputs = random_case(seed, most_gpus=4, most_layers=layers)
    compute = SlowAttention(sample_s=inputs.compute.sample_s, fixed_s=inputs.compute.fixed_s)
    space = replace(inputs.space, recompute=("none", "selective", "full"))
    return replace(inputs, compute=compute, space=space)


def all_ways(stage):
    """Every number of layers, and core attention, of every GPU class."""
    full = [
        MemorySettings(mode="full", recomputed=number) for number in range(1, stage.num_layers + 1)
    ]
    selective = MemorySettings(mode="selective", recomputed=stage.num_layers)
    each = [MemorySettings(), selective, *full]
    return product(each, repeat=len(stage.device_group.gpu_classes))


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2000),
    num_layers=st.integers(1, 5),
    size=st.sampled_from([1, 2, 4]),
    in_flight=st.sampled_from([2.0, 6.0, 12.0]),
)
def test_no_way_to_recompute_is_faster(seed, num_layers, size, in_flight):
    """Against all of them: the greedy choice may round to a micro-batch more at most."""
    inputs = mixed_case(seed)
    model = Estimator(inputs).cost_model
    group = DeviceGroups(inputs).of(tuple(range(inputs.world_size)))
    position = StagePosition(is_first=False, is_last=False, in_flight_limit=in_flight)
    stage = Stage(group, num_layers, (size,) * len(group.gpu_classes), position)
    cost = model.cost(stage)
    best_s = min(
        (
            model.with_settings(stage, way, 0.0).busy_s
            for way in all_ways(stage)
            if model.memory.free_bytes(stage, model.counts(stage, way), way) >= 0
        ),
        default=None,
    )
    if best_s is None:
        assert cost is None
        return
    assert cost is not None
    slowest_s = max(each.both_s for each in cost.passes)
    assert cost.busy_s <= best_s + slowest_s
    assert model.memory.free_bytes(stage, model.counts(stage, cost.settings), cost.settings) >= 0


def test_a_fast_gpu_keeps_what_the_slow_one_beside_it_recomputes():
    """The plan says so, it fits and can be executed, and no settings for both are as fast."""
    inputs = mixed_case(0)
    inputs = replace(inputs, **shared_by_unlike_gpus(inputs))
    estimator = Estimator(inputs)
    groups = (DeviceGroups(inputs).of((0, 1)),)
    (estimate,) = estimator.best(Candidate(device_groups=groups, levels=((2, 1),)))
    plan = Builder(inputs, estimator.cost_model, estimator.in_flight).plan(estimate)
    assert plan is not None
    refuse_unsupported(plan)
    found = settings_by_rank(plan)
    assert found[0].recompute is None
    assert found[1].recompute is not None
    result = simulated(inputs, plan)
    assert fits(inputs, result)
    stage = estimate.stages[0]
    model = estimator.cost_model
    alike = [
        model.with_settings(stage, way, 0.0).busy_s
        for way in all_ways(stage)
        if len(set(way)) == 1 and model.memory.free_bytes(stage, model.counts(stage), way) >= 0
    ]
    assert estimate.costs[0].busy_s < min(alike)


def shared_by_unlike_gpus(inputs):
    """Two GPUs, of which the slow one has too little memory for all activations."""
    kinds = ("fast", "slow")
    memory = inputs.memory
    parameters = inputs.num_layers * memory.layer_parameters() + 600
    whole = memory.parameter_bytes(parameters) + memory.gradient_bytes(parameters)
    spec = Topology.of(
        (
            node(
                "n0",
                gpu_kinds=kinds,
                link_bytes_per_s=1e6,
                link_latency_s=1e-4,
                host_link_bytes_per_s=1e6,
                nic_bytes_per_s=2e5,
                nic_latency_s=1e-3,
            ),
        )
    )
    return {
        "spec": spec,
        "comm": GraphComm(spec),
        "kinds": kinds,
        "capacities_bytes": (whole + memory.state_bytes(parameters) + 40_000, whole + 3_000),
        "host_bytes": (None, None),
        "cluster": replace(inputs.cluster, gpu_kinds=kinds),
    }
