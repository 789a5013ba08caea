"""What one more GPU or one part less brings is what planning that cluster finds."""

import dataclasses

import pytest

from zorse_megatron.planner.explain import replan as replan_module
from zorse_megatron.planner.explain.analysis import explain
from zorse_megatron.planner.explain.replan import Replans, replan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.other_gpus import on_ranks, with_one_more
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.model.model_presets import MODELS
from zorse_megatron.schema.text.figures import duration

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
        space=SearchSpace(max_tensor_parallel=1),
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


def test_one_gpu_node_or_region_less_is_planned_again():
    """The T4 at another site slows the A6000s, and is a node, a region and the last T4 in one."""
    inputs = lab(
        """
nodes:
  - {name: near, count: 2, gpus: 2 x A6000, nics: 100 Gb/s, region: here}
  - {name: far, gpus: 1 x T4, nics: 1 Gb/s, region: there}
between_regions: [{bandwidth: 800 Mb/s, latency: 2 ms}]
"""
    )
    found = replan(inputs)
    rows = {(less.part, less.name): less for less in found.one_less}
    assert {key: less.ranks for key, less in rows.items()} == {
        ("region", "there"): (4,),
        ("region", "here"): (0, 1, 2, 3),
        ("node", "near-1"): (2, 3),
        ("GPU", "A6000 of node near-1"): (3,),
    }
    for less in rows.values():
        left = tuple(rank for rank in range(5) if rank not in less.ranks)
        assert less.iteration_s == find_plan(on_ranks(inputs, left)).iteration_s
        assert less.speedup == found.again_s / less.iteration_s
    assert found.faster_without[0] == rows["region", "there"]
    assert rows["region", "here"] not in found.faster_without
    told = explain(inputs, find_plan(inputs).plan, found).sentences
    assert any(each.startswith("Without region there: ") for each in told)
    assert not any(each.startswith("Without region here: ") for each in told)


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
    monkeypatch.setattr(replan_module, "MOST_GPUS", 3)
    assert replan(lab()) is None
