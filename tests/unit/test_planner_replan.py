"""What one more GPU brings is what planning that cluster finds."""

import dataclasses

import pytest

from zorse_megatron.files.wording import duration
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.planner import find_plan as find_plan_module
from zorse_megatron.planner.explain import explain
from zorse_megatron.planner.find_plan import Replans, find_plan, replan
from zorse_megatron.planner.inputs.search_inputs import (
    SearchSpace,
    make_inputs,
    on_ranks,
    with_one_more,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("little_effort")]
CLUSTER = """
name: lab
switches: [{name: leaf, uplink: {bandwidth: 10 Gb/s}}, {name: other, uplink: {bandwidth: 10 Gb/s}}]
nodes:
  - {name: new, gpus: 2 x A6000, nics: 100 Gb/s, host_memory: 60GiB, switch: leaf}
  - {name: old, gpus: 1 x T4, nics: 25 Gb/s, host_memory: 60GiB, switch: other}
"""
MODEL = dataclasses.replace(MODELS["llama-1b"], seq_length=512, num_layers=4)


def lab(cluster=CLUSTER):
    return make_inputs(
        parse_cluster(cluster.encode()),
        MODEL,
        None,
        global_batch_size=8,
        dtype="float16",
        space=SearchSpace(max_tensor_parallel=1, split_backward=False),
    )


def test_one_more_gpu_is_planned_again():
    inputs = lab()
    outcome = find_plan(inputs)
    found = replan(inputs)
    assert found.again_s == outcome.iteration_s
    rows = {more.kind: more for more in found.one_more}
    assert set(rows) == {"A6000", "T4"}
    larger_s = find_plan(lab(CLUSTER.replace("2 x A6000", "3 x A6000"))).iteration_s
    assert rows["A6000"].iteration_s == larger_s
    assert rows["A6000"].speedup == pytest.approx(outcome.iteration_s / larger_s)
    told = " ".join(explain(inputs, outcome.plan, found).sentences)
    assert "With one more A6000 in node new: " in told
    assert "Planned again, the same GPUs" not in told
    assert [more.speedup for more in found.one_more] == sorted(
        (more.speedup for more in found.one_more), reverse=True
    )


def test_a_plan_that_is_not_the_best_is_told_so():
    inputs = lab()
    slow = find_plan(inputs, strategy="cephalo").plan
    best_s = 0.5 * explain(inputs, slow).iteration_s
    told = " ".join(explain(inputs, slow, Replans(again_s=best_s, one_more=())).sentences)
    assert f"finds {duration(best_s)} on the same GPUs: 100 % faster than this plan." in told


def test_the_new_gpu_goes_where_there_is_room():
    inputs = lab()
    larger, node = with_one_more(inputs, "A6000")
    assert (larger.kinds, node) == (("A6000", "A6000", "A6000", "T4"), "new")
    assert larger.capacities_bytes[2] == inputs.capacities_bytes[0]
    assert larger.host_bytes == (20 * 2**30,) * 3 + (60 * 2**30,)
    assert larger.cluster.gpu_kinds == larger.kinds
    full = lab(CLUSTER.replace("2 x A6000", "8 x A6000"))
    larger, node = with_one_more(full, "A6000")
    assert node == "one more like new"
    assert larger.kinds == ("A6000",) * 8 + ("T4", "A6000")
    assert larger.host_bytes[-1] == 60 * 2**30


def test_some_of_the_gpus():
    inputs = lab()
    part = on_ranks(inputs, (1,))
    assert (part.world_size, part.kinds) == (1, ("A6000",))
    assert [switch.name for switch in part.spec.switches] == ["leaf"]
    assert part.host_bytes == (60 * 2**30,)
    by_hand = lab(
        CLUSTER.replace("2 x A6000", "1 x A6000")
        .replace(", {name: other, uplink: {bandwidth: 10 Gb/s}}", "")
        .replace(CLUSTER.splitlines()[5], "")
    )
    assert find_plan(part).iteration_s == find_plan(by_hand).iteration_s


def test_large_clusters_are_not_planned_again(monkeypatch):
    monkeypatch.setattr(find_plan_module, "MOST_TO_REPLAN", 3)
    assert replan(lab()) is None
