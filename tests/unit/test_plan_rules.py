"""Each rule that ties values together: broken on purpose, and kept at its edge."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.strategies import plans
from tests.unit.plan_samples import good, load, only_problem, problems
from zorse_megatron.errors import PlanError
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_rules import problems_of


def with_layers(*layers):
    plan = good()
    for chunk, span in zip(plan["chunks"], layers, strict=True):
        chunk["layers"] = list(span)
    return plan


def replica_of(plan, group, index=0):
    return plan["groups"][group]["replicas"][index]


def test_the_sample_is_good():
    assert problems(good()) == ()


# Ranks


def test_duplicate_rank_in_two_groups():
    plan = good()
    replica_of(plan, 1)["ranks"] = [2, 3]
    problem = only_problem(plan)
    assert problem.where == "plan.json: groups"
    assert problem.found == "rank 3 in 2 places: groups[1].replicas[0], groups[2].replicas[1]"


def test_duplicate_rank_in_one_replica():
    plan = good()
    replica_of(plan, 1)["ranks"] = [2, 2]
    assert "rank 2 in 2 places: groups[1].replicas[0], groups[1].replicas[0]" in str(
        only_problem(plan)
    )


def test_missing_ranks():
    plan = good()
    replica_of(plan, 1)["ranks"] = [8]
    problem = only_problem(plan)
    assert problem.found == "ranks 2, 5 to 7 (4 in all) in no replica"
    assert "from 0 to 8" in problem.expected


def test_ranks_that_start_at_1():
    plan = good()
    replica_of(plan, 0)["ranks"] = [5]
    assert only_problem(plan).found == "rank 0 in no replica"


def test_negative_rank():
    plan = good()
    replica_of(plan, 1)["ranks"] = [2, -1]
    problem = only_problem(plan)
    assert (problem.where, problem.found) == ("plan.json: groups[1].replicas[0].ranks", "rank -1")


def test_an_absurd_rank_is_reported_not_enumerated():
    plan = good()
    replica_of(plan, 1)["ranks"] = [10**15]
    assert "2, 5 to 999999999999999" in only_problem(plan).found


# Layers


def test_layer_gap():
    problem = only_problem(with_layers((0, 5), (6, 7), (7, 12)))
    assert problem.where == "plan.json: chunks"
    assert problem.found == "layer 5 in no chunk"
    assert problem.expected == "every layer from 0 to 11 in exactly one chunk"


def test_layer_overlap():
    problem = only_problem(with_layers((0, 7), (5, 7), (7, 12)))
    assert problem.found == "layers 5 to 6 (2 in all) in more than one chunk: chunks[0], chunks[1]"


def test_too_few_layers():
    assert only_problem(with_layers((0, 5), (5, 7), (7, 10))).found == (
        "layers 10 to 11 (2 in all) in no chunk"
    )


def test_too_many_layers():
    problem = only_problem(with_layers((0, 5), (5, 7), (7, 13)))
    assert problem.where == "plan.json: chunks[2].layers"
    assert problem.found == "[7, 13]"
    assert "within [0, 12)" in problem.expected


def test_first_layer_is_1():
    assert only_problem(with_layers((1, 5), (5, 7), (7, 12))).found == "layer 0 in no chunk"


@pytest.mark.parametrize("empty", [(5, 5), (7, 5)])
def test_empty_chunk(empty):
    problem = only_problem(with_layers((0, 5), empty, (5, 12)))
    assert problem.where == "plan.json: chunks[1].layers"
    assert problem.found == str(list(empty))
    assert "at least one layer" in problem.expected


def test_chunks_out_of_model_order():
    problem = only_problem(with_layers((0, 5), (7, 12), (5, 7)))
    assert problem.where == "plan.json: chunks[2].layers"
    assert problem.found == "[5, 7] after [7, 12] of chunks[1]"


def test_an_absurd_number_of_layers_is_reported_not_enumerated():
    plan = good()
    plan["model"]["num_layers"] = 10**15
    assert "12 to 999999999999999" in only_problem(plan).found


@given(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(-1, 6)), min_size=1, max_size=4),
    st.integers(1, 5),
)
def test_layers_pass_exactly_when_the_chunks_are_a_partition(spans, num_layers):
    plan = good()
    plan["model"]["num_layers"] = num_layers
    plan["groups"] = plan["groups"][:1]
    plan["chunks"] = [{"group": 0, "layers": list(span)} for span in spans]
    held = [layer for span in spans for layer in range(*span)]
    is_partition = held == list(range(num_layers)) and all(a < b for a, b in spans)
    assert (problems(plan) == ()) == is_partition


# Chunks and groups


@pytest.mark.parametrize("group", [-1, 3])
def test_chunk_of_no_group(group):
    plan = good()
    plan["chunks"].insert(1, {"group": group, "layers": [5, 6]})
    plan["chunks"][2]["layers"] = [6, 7]
    problem = only_problem(plan)
    assert problem.where == "plan.json: chunks[1].group"
    assert (problem.found, problem.expected) == (str(group), "a group from 0 to 2")


def test_group_without_chunk():
    plan = good()
    plan["chunks"][1]["group"] = 0
    problem = only_problem(plan)
    assert problem.where == "plan.json: groups[1]"
    assert problem.found == "a group without a chunk"


# Work and state


def test_batch_that_does_not_add_up():
    plan = good()
    replica_of(plan, 2, 0)["num_microbatches"] = 7
    problem = only_problem(plan)
    assert problem.where == "plan.json: groups[2]"
    assert problem.found == "27 samples (replicas[0] 3 x 7 = 21, replicas[1] 1 x 6 = 6)"
    assert "24 samples" in problem.expected
    assert "-3 samples" in problem.remedy


def test_zero_micro_batches_are_allowed():
    plan = good()
    replica_of(plan, 0, 0)["num_microbatches"] = 6
    replica_of(plan, 0, 1)["num_microbatches"] = 0
    assert problems(plan) == ()


def test_zero_shard_weight_is_allowed():
    plan = good()
    replica_of(plan, 0, 1)["shard_weight"] = 0
    assert problems(plan) == ()


def test_all_zero_shard_weights_are_not():
    plan = good()
    replica_of(plan, 0, 0)["shard_weight"] = replica_of(plan, 0, 1)["shard_weight"] = 0
    problem = only_problem(plan)
    assert problem.where == "plan.json: groups[0]"
    assert "add up to 0" in problem.found


def test_shard_weights_with_an_infinite_sum_are_not():
    plan = good()
    replica_of(plan, 0, 0)["shard_weight"] = replica_of(plan, 0, 1)["shard_weight"] = 1.5e308
    assert "add up to inf" in only_problem(plan).found


# Settings


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_recompute_layers_without_full(mode):
    plan = good()
    plan["groups"][1]["recompute"] = {"mode": mode, "num_layers": 1}
    assert only_problem(plan).where == "plan.json: groups[1].recompute.num_layers"
    plan["groups"][1]["recompute"]["mode"] = "full"
    assert problems(plan) == ()


@pytest.mark.parametrize(
    ("section", "field", "entry"),
    [("cluster", "gpu_kinds", "A100"), ("predictions", "peak_memory_bytes", 1 << 30)],
)
def test_lists_per_rank(section, field, entry):
    plan = good()
    plan[section] = {field: [entry] * 5}
    assert problems(plan) == ()
    plan[section] = {field: [entry] * 4}
    problem = only_problem(plan)
    assert problem.where == f"plan.json: {section}.{field}"
    assert (problem.found, problem.expected) == ("4 entries", "5, one per rank")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "breadth_first"])
def test_unknown_schedule_parameters(name):
    plan = good()
    plan["schedule"] = {"name": name, "parameters": {"depth": "2", "width": ""}}
    assert [problem.where for problem in problems(plan)] == [
        "plan.json: schedule.parameters.depth",
        "plan.json: schedule.parameters.width",
    ]


@pytest.mark.parametrize("value", ["resident", "per_pass", "per_micro_batch"])
def test_known_schedule_parameters(value):
    plan = good()
    plan["schedule"] = {"name": "breadth_first", "parameters": {"parameters": value}}
    assert problems(plan) == ()


@pytest.mark.parametrize("value", ["per_layer", ""])
def test_values_of_schedule_parameters(value):
    plan = good()
    plan["schedule"] = {"name": "breadth_first", "parameters": {"parameters": value}}
    problem = only_problem(plan)
    assert problem.where == "plan.json: schedule.parameters.parameters"
    assert problem.found == repr(value)
    assert problem.expected == "one of 'per_pass', 'resident', 'per_micro_batch'"


# All at once


def test_every_broken_rule_is_reported_at_once():
    plan = with_layers((0, 5), (6, 7), (7, 13))
    replica_of(plan, 1)["ranks"] = [0]
    replica_of(plan, 2, 1)["micro_batch_size"] = 2
    replica_of(plan, 1)["shard_weight"] = 0
    plan["chunks"].append({"group": 7, "layers": [12, 12]})
    plan["groups"][0]["recompute"] = {"mode": "none", "num_layers": 1}
    plan["cluster"] = {"gpu_kinds": []}
    plan["schedule"]["parameters"] = {"depth": "2"}
    found = [(problem.where, problem.found) for problem in problems(plan)]
    assert [(where.removeprefix("plan.json: "), what) for where, what in found] == [
        ("groups", "rank 0 in 2 places: groups[0].replicas[0], groups[1].replicas[0]"),
        ("groups", "rank 2 in no replica"),
        ("chunks[2].layers", "[7, 13]"),
        ("chunks[3].layers", "[12, 12]"),
        ("chunks", "layer 5 in no chunk"),
        ("chunks[3].group", "7"),
        ("groups[2]", "30 samples (replicas[0] 3 x 6 = 18, replicas[1] 2 x 6 = 12)"),
        ("groups[1]", "shard_weight values that add up to 0.0"),
        ("groups[0].recompute.num_layers", '1 with mode "none"'),
        ("cluster.gpu_kinds", "0 entries"),
        ("schedule.parameters.depth", 'a parameter that schedule "1f1b" does not have'),
    ]


def test_long_lists_are_cut():
    plan = good()
    plan["groups"][1]["replicas"] = [
        {"ranks": [rank], "micro_batch_size": 1, "num_microbatches": 1, "shard_weight": 1}
        for rank in [2, *range(5, 1000)]
    ]
    assert only_problem(plan).found.endswith("replicas[15] 1 x 1 = 1, and 980 more)")


def test_a_problem_without_a_file_has_no_file_in_where():
    plan = good()
    plan["chunks"][1]["group"] = 0
    with pytest.raises(PlanError):
        load(plan)
    (problem,) = problems_of(_unchecked(plan))
    assert problem.where == "groups[1]"


def _unchecked(value):
    """Build a plan without the rules, as a planner would in Python."""
    return TypeAdapter(Plan).validate_json(json.dumps(value))


@pytest.mark.slow
@given(plans(with_options=True, max_chunks_per_group=3, max_ranks_per_replica=2), st.data())
def test_one_sample_too_many_in_any_replica_is_found(plan, data):
    group = data.draw(st.integers(0, len(plan.groups) - 1))
    old = plan.groups[group]
    replica = data.draw(st.sampled_from(old.replicas))
    more = dataclasses.replace(replica, num_microbatches=replica.num_microbatches + 1)
    replicas = tuple(more if each is replica else each for each in old.replicas)
    groups = list(plan.groups)
    groups[group] = dataclasses.replace(old, replicas=replicas)
    (problem,) = problems_of(dataclasses.replace(plan, groups=tuple(groups)))
    assert problem.where == f"groups[{group}]"


# Samples in flight


def test_extra_samples_in_flight_under_breadth_first():
    plan = good()
    plan["schedule"] = {"name": "breadth_first"}
    plan["groups"][1]["extra_in_flight"] = 3
    problem = only_problem(plan)
    assert problem.where == "plan.json: groups[1].extra_in_flight"
    assert problem.found == "3"


def test_samples_are_delayed_only_where_backwards_are_split():
    plan = good()
    plan["groups"][1]["delayed_samples"] = 3
    problem = only_problem(plan)
    assert problem.where == "plan.json: groups[1].delayed_samples"
    plan["groups"][1]["split_backward"] = True
    assert problems(plan) == ()


def test_a_type_that_a_kind_of_gpu_does_not_have():
    plan = good()
    plan["cluster"] = {"gpu_kinds": ["A100-40", "A100-40", "V100-16", "unheard of", "T4"]}
    for group, dtype in zip(plan["groups"], ("bf16", "fp16", "fp32"), strict=True):
        group["compute_dtype"] = dtype
    assert problems(plan) == ()
    plan["groups"][1]["compute_dtype"] = plan["groups"][2]["compute_dtype"] = "bf16"
    first, second = problems(plan)
    assert first.where == "plan.json: groups[1].compute_dtype"
    assert first.found == '"bf16" on V100-16, without support for it'
    assert second.found == '"bf16" on T4, without support for it'


# Hops


def test_a_hop_after_the_last_chunk_or_within_a_group():
    plan = good()
    plan["chunks"][1]["group"] = 0
    plan["groups"].pop(1)
    plan["chunks"][2]["group"] = 1
    for replica, rank in zip(plan["groups"][1]["replicas"], (2, 3), strict=True):
        replica["ranks"] = [rank]
    plan["schedule"] = {"name": "interleaved"}
    for chunk in plan["chunks"]:
        chunk["hop"] = {"latency": 0.1, "load": 2}
    first, second = problems(plan)
    assert first.where == "plan.json: chunks[0].hop"
    assert first.found == "a hop to chunks[1] of the same group 0"
    assert second.where == "plan.json: chunks[2].hop"
    assert second.found == "a hop after the last chunk"
