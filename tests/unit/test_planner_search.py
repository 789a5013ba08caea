"""What the planner promises of every plan: valid, fitting, reproducible; or the missing amount.

Without tensor-parallel groups, of which `test_planner_tensor_parallel` says the same.
"""

import dataclasses
import math
from functools import cache

import pytest

from tests.unit.planner_cases import fits, random_case, simulated
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.plan.plan import Offload, Recompute
from zorse_megatron.plan.plan_file import dump_plan, fingerprint, parse_plan
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.explain import explain
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import (
    MAX_GPUS,
    MAX_LAYERS,
    Inputs,
    SearchSpace,
    make_inputs,
)
from zorse_megatron.planner.outcome import STRATEGIES, NoPlanError, Outcome, PlannerInputError
from zorse_megatron.schedule.lower import refuse_unsupported

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("little_effort")]

CLUSTER = """
name: lab
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 100 Gb/s}
  - {name: old, count: 2, gpus: 2 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""
MODEL = dataclasses.replace(MODELS["llama-1b"], seq_length=512)


NO_TP = SearchSpace(max_tensor_parallel=1, split_backward=False)


def lab(cluster: str = CLUSTER, *, batch: int = 12, space: SearchSpace = NO_TP) -> Inputs:
    return make_inputs(
        parse_cluster(cluster.encode()),
        MODEL,
        None,
        global_batch_size=batch,
        dtype="float16",
        space=space,
    )


@cache
def found_in_lab(strategy: str) -> Outcome:
    return find_plan(lab(), strategy=strategy)


@pytest.mark.parametrize("seed", (31, 32, 33))
def test_no_alternative_that_is_shown_beats_the_plan(seed):
    """In case 33 the search alone stopped one layer before."""
    inputs = random_case(seed)
    outcome = find_plan(inputs)
    told = explain(inputs, outcome.plan)
    assert told.iteration_s == outcome.iteration_s
    for other in told.alternatives:
        assert other.iteration_s is None or other.iteration_s >= outcome.iteration_s, other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_are_valid_and_fit(strategy):
    inputs = lab()
    outcome = found_in_lab(strategy)
    assert parse_plan(dump_plan(outcome.plan).encode()) == outcome.plan
    result = simulated(inputs, outcome.plan)
    assert fits(inputs, result)
    assert result.iteration_s == pytest.approx(outcome.iteration_s)
    assert outcome.plan.model == MODEL.fingerprint()
    assert outcome.plan.cluster is not None
    assert outcome.plan.cluster.gpu_kinds == inputs.kinds
    predictions = outcome.plan.predictions
    assert predictions is not None
    assert predictions.peak_memory_bytes == result.peak_memory_bytes
    assert predictions.iteration_s == outcome.iteration_s
    assert outcome.bound_s == lower_bound_s(inputs)
    assert 0 < outcome.peak_memory_fraction <= 1


def test_no_baseline_is_faster():
    rates = {name: found_in_lab(name).tokens_per_s for name in STRATEGIES}
    assert rates["zorse"] == max(rates.values())


def test_equal_inputs_give_equal_plans():
    first, second = found_in_lab("zorse"), find_plan(lab())
    assert dump_plan(first.plan) == dump_plan(second.plan)
    assert fingerprint(first.plan) == fingerprint(second.plan)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "breadth_first"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_runtime_executes_what_is_found(schedule, seed):
    inputs = random_case(seed, most_gpus=4, most_layers=8)
    space = dataclasses.replace(inputs.space, schedules=(schedule,), offload=True)
    outcome = find_plan(dataclasses.replace(inputs, space=space))
    refuse_unsupported(outcome.plan)  # raises where something is not executed


def short_of_memory() -> Inputs:
    """Two GPUs that hold half of what one group or two need."""
    inputs = random_case(1)
    parameters = inputs.num_layers * 640 + 600
    return dataclasses.replace(
        inputs, capacities_bytes=tuple(6 * parameters // 4 for _ in inputs.kinds)
    )


def test_the_missing_amount_makes_a_plan_possible():
    inputs = short_of_memory()
    with pytest.raises(NoPlanError) as caught:
        find_plan(inputs)
    error = caught.value
    assert error.bytes_per_gpu > 0
    rounded_up = math.ceil(100 * error.bytes_per_gpu / 2**30) / 100
    assert f"{rounded_up:.2f} GiB more on each" in str(error)
    assert "bytes" not in str(error)
    richer = tuple(
        capacity + (error.bytes_per_gpu if kind in error.gpu_kinds else 0)
        for capacity, kind in zip(inputs.capacities_bytes, inputs.kinds, strict=True)
    )
    outcome = find_plan(dataclasses.replace(inputs, capacities_bytes=richer))
    assert outcome.iteration_s > 0
    count = sum(kind in error.gpu_kinds for kind in inputs.kinds)
    assert error.missing_bytes == count * error.bytes_per_gpu


def test_a_gpu_that_is_too_small_for_one_layer_is_named():
    tiny = """
gpu_kinds:
  - {name: toy, like: T4, memory: 1GB}
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 100 Gb/s}
  - {name: old, gpus: 1 x toy, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""
    model = dataclasses.replace(MODELS["llama-65b"], num_layers=4, seq_length=512)
    inputs = make_inputs(
        parse_cluster(tiny.encode()), model, None, global_batch_size=8, dtype="float16"
    )
    with pytest.raises(NoPlanError, match="toy"):
        find_plan(inputs)


def test_unknown_strategies_and_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="expected one of zorse"):
        find_plan(lab(), strategy="best")  # type: ignore[arg-type]
    with pytest.raises(PlannerInputError) as caught:
        make_inputs(
            parse_cluster(CLUSTER.encode()),
            MODEL,
            None,
            global_batch_size=0,
            dtype="bfloat16",
            memory_margin=1.5,
        )
    positions = [problem.where for problem in caught.value.problems]
    assert positions == [
        "global batch size",
        "memory margin",
        "GPU kind T4",  # it has no units for bfloat16
    ]


def test_progress_is_reported():
    seen = []
    find_plan(random_case(1, most_gpus=4, most_layers=6), on_progress=seen.append)
    assert {"grouping", "costing", "simulating"} <= {each.phase for each in seen}
    assert all(each.done >= 0 for each in seen)


def test_explanations_agree_with_the_simulator():
    inputs = lab()
    outcome = found_in_lab("zorse")
    found = explain(inputs, outcome.plan)
    assert found.iteration_s == pytest.approx(outcome.iteration_s)
    for load in found.loads:
        assert load.busy + load.communication + load.waiting == pytest.approx(1.0)
    assert sum(load.num_layers for load in found.loads) == MODEL.num_layers
    assert sum(found.critical_path.by_work_s.values()) == pytest.approx(found.iteration_s)
    assert [each.free_bytes >= 0 for each in found.headroom] == [True] * inputs.world_size
    assert found.replans is None
    assert not any("One more" in sentence for sentence in found.sentences)
    assert found.bottleneck_group == max(found.loads, key=lambda load: load.busy).group
    assert len(found.sentences) >= 4
    with pytest.raises(ValueError, match="expected as many of both"):
        explain(random_case(0), outcome.plan)


SLOW_PAIR = """
name: pair
nodes:
  - {name: here, gpus: 1 x A100-40, nics: 1 Gb/s}
  - {name: there, gpus: 1 x A100-40, nics: 1 Gb/s}
"""


def test_gradients_are_sent_in_16_bits_only_where_that_is_allowed_and_faster():
    one_group = dataclasses.replace(NO_TP, max_groups=1)
    space = dataclasses.replace(one_group, grad_reduce_dtype="bf16")
    slow, allowed = (lab(SLOW_PAIR, space=each) for each in (one_group, space))
    before, after = find_plan(slow, stock=()), find_plan(allowed, stock=())
    assert [group.grad_reduce_dtype for group in before.plan.groups] == [None]
    assert [group.grad_reduce_dtype for group in after.plan.groups] == ["bf16"]
    assert after.iteration_s < before.iteration_s
    assert simulated(allowed, after.plan).iteration_s == pytest.approx(after.iteration_s)
    assert any("16 bits" in note for note in after.notes)
    # Eight GPUs behind each NIC: sent directly, half the bytes take longer than around a ring.
    crowded = SLOW_PAIR.replace("1 x A100-40", "8 x A100-40")
    found = find_plan(lab(crowded, space=space))
    assert [group.grad_reduce_dtype for group in found.plan.groups] == [None]


def test_backwards_are_split_only_where_that_is_allowed_and_faster():
    """The plan of a cluster with a bubble; and again with the flag in no group, simulated."""
    spaces = (
        dataclasses.replace(NO_TP, schedules=("1f1b",), split_backward=allowed)
        for allowed in (False, True)
    )
    plain, allowed = (lab(space=each) for each in spaces)
    before, after = find_plan(plain, stock=()), find_plan(allowed, stock=())
    assert not any(group.split_backward for group in before.plan.groups)
    split = [number for number, group in enumerate(after.plan.groups) if group.split_backward]
    assert split
    assert after.iteration_s < before.iteration_s
    assert simulated(allowed, after.plan).iteration_s == pytest.approx(after.iteration_s)
    (said,) = [each for each in explain(allowed, after.plan).sentences if "Weight grad" in each]
    assert str(split[-1]) in said


def test_fp16_messages_need_a_loss_scale():
    with pytest.raises(PlannerInputError, match="communication dtype"):
        make_inputs(
            parse_cluster(SLOW_PAIR.encode()),
            MODEL,
            None,
            global_batch_size=4,
            dtype="bfloat16",
            space=SearchSpace(grad_reduce_dtype="fp16"),
        )


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


# Limits.


def test_refuses_clusters_and_models_beyond_the_limits() -> None:
    inputs = random_case(5, most_layers=6)
    kinds = inputs.kinds[:1] * (MAX_GPUS + 1)
    large = dataclasses.replace(inputs, kinds=kinds, num_layers=MAX_LAYERS + 1)
    with pytest.raises(PlannerInputError) as refused:
        find_plan(large)
    assert [problem.where for problem in refused.value.problems] == ["the cluster", "the model"]
    with pytest.raises(PlannerInputError, match="at most 512"):
        find_plan(dataclasses.replace(inputs, num_layers=MAX_LAYERS + 1))
