"""Plans whose groups compute in types of their own: what the planner writes is what is priced."""

import dataclasses
import json

import pytest

from tests.unit.profile_samples import good as good_profile
from zorse_megatron.gpus.gpu import common_dtype
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import Profile, parse_profile
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace, make_inputs
from zorse_megatron.planner.outcome import STRATEGIES, PlannerInputError
from zorse_megatron.planner.simulate_plan import simulate_plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("little_effort")]
MODEL = dataclasses.replace(MODELS["llama-1b"], num_layers=8, seq_length=512)
LAB = """
name: lab
gpu_kinds:
  - {name: relic, memory: 24GB, memory_bandwidth: 300 GB/s, peak: {float32: 10 TFLOP/s}}
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 10 Gb/s}
  - {name: old, gpus: 2 x OLD, link: PCIe 6 GB/s, host_link: 9 GB/s, nics: 10 Gb/s}
"""
# Kind beside the A100 -> its type, and that of a group of both.
BESIDE = {"T4": ("fp16", "fp16"), "V100-16": ("fp16", "fp16"), "relic": ("fp32", "fp32")}


NO_TP = SearchSpace(max_tensor_parallel=1, split_backward=False)


def lab(old: str, dtype="auto", *, space: SearchSpace = NO_TP, profile=None) -> Inputs:
    cluster = LAB.replace("OLD", old)
    return make_inputs(
        parse_cluster(cluster.encode()),
        MODEL,
        profile,
        global_batch_size=16,
        dtype=dtype,
        space=space,
    )


def types_of(plan: Plan, inputs: Inputs) -> dict[frozenset[str], str | None]:
    """Kinds of a group -> its type."""
    return {
        frozenset(inputs.kinds[rank] for rank in group.ranks): group.compute_dtype
        for group in plan.groups
    }


def test_kinds_have_the_units_of_their_generation():
    """NVIDIA has bfloat16 from Ampere on; all of these have float16."""
    before = {"V100-32", "V100-16", "V100-PCIE-16", "V100-PCIE-32", "T4", "P100", "P40", "W6800"}
    before |= {"RTX2080Ti"}
    assert {name for name, kind in GPU_KINDS.items() if not kind.computes_in("bf16")} == before
    assert all(kind.computes_in("fp16") and kind.computes_in("fp32") for kind in GPU_KINDS.values())
    assert common_dtype([GPU_KINDS["H100-80"], GPU_KINDS["L4"]]) == "bf16"
    assert common_dtype([GPU_KINDS["H100-80"], GPU_KINDS["T4"]]) == "fp16"


@pytest.mark.parametrize(
    ("old", "most_groups", "max_tp_degree"),
    [*((old, groups, 1) for old in BESIDE for groups in (1, 4)), ("T4", 4, 2)],
)
def test_groups_get_what_all_of_their_gpus_compute_in(old, most_groups, max_tp_degree):
    space = SearchSpace(max_groups=most_groups, max_tensor_parallel=max_tp_degree)
    inputs = lab(old, space=space)
    own, both = BESIDE[old]
    expected = {
        frozenset({"A100-40"}): "bf16",
        frozenset({old}): own,
        frozenset({"A100-40", old}): both,
    }
    # What stock has is in one type.
    found = types_of(find_plan(inputs, stock=()).plan, inputs)
    assert len(found) == 1 if most_groups == 1 else len(found) > 1
    assert found.items() <= expected.items()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("old", ["T4", "relic"])
def test_plans_are_priced_in_the_types_that_they_name(strategy, old):
    """By the simulator alone, where no group is left to the type of the job."""
    inputs = lab(old)
    outcome = find_plan(inputs, strategy=strategy)
    types = {group.compute_dtype for group in outcome.plan.groups}
    assert None not in types
    if strategy == "stock":
        assert types == {BESIDE[old][1]}, "stock knows one type for the whole job"
    # The costs of the job's type are another job's here: they must not be asked.
    other = lab(old, "float32")
    mixed = dataclasses.replace(inputs, compute=other.compute, memory=other.memory)
    result = simulate_plan(mixed, outcome.plan)
    assert result.iteration_s == pytest.approx(outcome.iteration_s)
    assert outcome.plan.predictions is not None
    assert outcome.plan.predictions.peak_memory_bytes == result.peak_memory_bytes


def tiny_profile(**changes) -> Profile:
    value = good_profile()
    value["times"][0].update(changes)
    return parse_profile(json.dumps(value).encode())


def priced_tiny(dtype, profile: Profile) -> Inputs:
    """The profile's own model on the cluster with T4s."""
    cluster = LAB.replace("OLD", "T4")
    return make_inputs(
        parse_cluster(cluster.encode()),
        profile.models[0],
        profile,
        global_batch_size=4,
        dtype=dtype,
    )


def test_measured_times_of_a_kind_in_its_own_type_are_used_and_missing_ones_are_named():
    inputs = priced_tiny("auto", tiny_profile())
    assert inputs.compute.layer("T4", 2).forward_s == 0.002
    said = {note.partition(":")[0]: note for note in inputs.notes}
    assert "measured" in said["T4 in float16"]
    assert "estimated" in said["A100-40 in bfloat16"]
    # Times in another width do not answer, and the note says so.
    other = priced_tiny("auto", tiny_profile(dtype="float32"))
    assert any(note.startswith("T4 in float16: estimated") for note in other.notes)


def test_a_type_without_units_is_refused_and_the_way_out_is_named():
    # A T4 measured in float16 does not say how long bfloat16 takes, which it has no units for.
    for profile in (None, tiny_profile()):
        with pytest.raises(PlannerInputError) as caught:
            lab("T4", "bfloat16", profile=profile)
        (problem,) = caught.value.problems
        assert problem.where == "GPU kind T4"
        assert problem.found == "no hardware support for bfloat16"
        assert "--dtype auto" in problem.remedy
        assert "fp16" in problem.remedy
    # Somebody ran this very type on it: that is believed.
    inputs = priced_tiny("bfloat16", tiny_profile(dtype="bfloat16"))
    assert inputs.compute.layer("T4", 2).forward_s == 0.002


def test_fp16_messages_only_where_every_plan_has_a_loss_scale():
    space = SearchSpace(grad_reduce_dtype="fp16")
    assert lab("T4", space=space).space.grad_reduce_dtype == "fp16"
    # A group of all kinds would compute in fp32 here; one of A100 alone in bf16.
    for old in ("relic", "A100-40"):
        with pytest.raises(PlannerInputError, match="communication dtype"):
            lab(old, space=space)
