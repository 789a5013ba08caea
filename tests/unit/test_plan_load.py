"""What the loader refuses in the shape of a plan. The rules between values: test_plan_rules.py."""

import dataclasses
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import plans
from tests.unit.plan_samples import good, load, only_problem, problems, problems_in, spoil
from zorse_megatron.errors import PlanError
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import dump_plan

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.data())
def test_any_value_anywhere_gives_a_plan_or_problems(data):
    plan, path, owner = good(), [], None
    node = plan
    while isinstance(node, dict | list) and node:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        path.append(data.draw(st.sampled_from(keys)))
        owner, node = node, node[path[-1]]
        if data.draw(st.booleans()):
            break
    owner[path[-1]] = data.draw(JSON_VALUES)
    for problem in problems(plan):
        assert problem.where.startswith("plan.json: ")
        assert all(dataclasses.astuple(problem))


@pytest.mark.parametrize("value", [[], 3, "plan", None, True])
def test_wrong_top_level(value):
    problem = only_problem(value)
    assert problem.where == "plan.json: top level"
    assert problem.expected == "an object"


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (["global_batch_size"], "24", "an integer"),
        (["global_batch_size"], 24.0, "an integer"),
        (["global_batch_size"], True, "an integer"),
        (["global_batch_size"], None, "an integer"),
        (["global_batch_size"], 0, "at least 1"),
        (["schema_version"], True, "an integer"),
        (["schema_version"], 1.0, "an integer"),
        (["schema_version"], "1", "an integer"),
        (["model", "num_layers"], 0, "at least 1"),
        (["model", "tied_embeddings"], 1, "true or false"),
        (["groups"], [], "at least 1 entry"),
        (["groups"], {}, "a list"),
        (["groups", 1], [], "an object"),
        (["groups", 1, "name"], 3, "a string"),
        (["groups", 1, "replicas"], [], "at least 1 entry"),
        (["groups", 1, "replicas", 0, "ranks"], [], "at least 1 entry"),
        (["groups", 1, "replicas", 0, "ranks"], 2, "a list"),
        (["groups", 1, "replicas", 0, "ranks", 0], True, "an integer"),
        (["groups", 1, "replicas", 0, "ranks", 0], 2.0, "an integer"),
        (["groups", 1, "replicas", 0, "micro_batch_size"], 0, "at least 1"),
        (["groups", 1, "replicas", 0, "num_microbatches"], -1, "at least 0"),
        (["groups", 1, "replicas", 0, "num_microbatches"], "8", "an integer"),
        (["groups", 1, "replicas", 0, "shard_weight"], "1", "a number"),
        (["groups", 1, "replicas", 0, "shard_weight"], True, "a number"),
        (["groups", 1, "replicas", 0, "shard_weight"], -0.5, "at least 0"),
        (["groups", 1, "replicas", 0, "shard_weight"], float("nan"), "a finite number"),
        (["groups", 1, "replicas", 0, "shard_weight"], float("inf"), "a finite number"),
        (["groups", 1, "recompute"], {"mode": "some"}, "'none', 'selective' or 'full'"),
        (["groups", 1, "recompute"], {"mode": "full", "num_layers": 0}, "at least 1"),
        (["groups", 1, "offload"], {"parameters": 1}, "true or false"),
        (["chunks"], [], "at least 1 entry"),
        (["chunks", 0, "group"], None, "an integer"),
        (["chunks", 0, "layers"], [0], "2 integers"),
        (["chunks", 0, "layers"], [0, 2, 5], "exactly 2 entries"),
        (["chunks", 0, "layers", 1], 5.0, "an integer"),
        (["chunks", 0, "hop"], {"latency": -0.1, "load": 1}, "at least 0"),
        (["chunks", 0, "hop"], {"latency": 1, "load": 1}, "a number less than 1"),
        (["chunks", 0, "hop"], {"latency": 0, "load": -1}, "at least 0"),
        (["chunks", 0, "hop"], {"latency": 0, "load": float("inf")}, "a finite number"),
        (["chunks", 0, "hop"], {"latency": float("nan"), "load": 0}, "a finite number"),
        (["schedule", "parameters"], {"depth": [1]}, "a string"),
        (["predictions"], {"iteration_s": 0}, "greater than 0"),
        (["predictions"], {"peak_memory_bytes": [-1] * 5}, "at least 0"),
    ],
)
def test_wrong_value(path, value, expected):
    found = problems(spoil(path, value))
    assert found
    # A value with wrong parts inside is located by its parts.
    prefix = "plan.json: "
    for item in path:
        prefix += f"[{item}]" if isinstance(item, int) else f".{item}"
    assert all(problem.where.startswith(prefix.replace(": .", ": ")) for problem in found)
    assert all(expected in problem.expected for problem in found)
    assert len(found) == (5 if value == {"peak_memory_bytes": [-1] * 5} else 1)


def test_integers_are_numbers():
    assert problems(spoil(["groups", 1, "replicas", 0, "shard_weight"], 1)) == ()


def test_null_is_absent():
    plan = good()
    plan["cluster"] = plan["predictions"] = plan["groups"][0]["recompute"] = None
    assert load(plan) == load(good())


def test_every_missing_key_is_reported():
    replica = {"ranks": [2]}
    found = problems(spoil(["groups", 1, "replicas", 0], replica))
    assert [problem.found for problem in found] == [
        'no key "micro_batch_size"',
        'no key "num_microbatches"',
        'no key "shard_weight"',
    ]
    assert {problem.where for problem in found} == {"plan.json: groups[1].replicas[0]"}


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        (["predictons"], "predictions"),
        (["model", "hiddensize"], "hidden_size"),
        (["groups", 0, "Recompute"], "recompute"),
        (["groups", 0, "OFFLOAD"], "offload"),
        (["groups", 0, "replicas", 0, "shard"], "shard_weight"),
        (["chunks", 0, "layer"], "layers"),
        (["schedule", "params"], "parameters"),
    ],
)
def test_unknown_key_with_suggestion(path, suggestion):
    problem = only_problem(spoil(path, 1))
    assert problem.found == f'unknown key "{path[-1]}"'
    assert problem.remedy == f'Did you mean "{suggestion}"?'
    assert suggestion in problem.expected


def test_unknown_key_like_no_other():
    problem = only_problem(spoil(["chunks", 0, "x"], 1))
    assert problem.expected == "only the keys group, layers, hop"
    assert problem.remedy.startswith("Remove it.")


def test_a_removed_key_names_the_way_now():
    replica = ["groups", 0, "replicas", 0]
    problem = only_problem(spoil([*replica, "rank_settings"], [{"offload": {}}]))
    assert problem.where == "plan.json: groups[0].replicas[0]"
    assert problem.found == 'unknown key "rank_settings"'
    assert "say recompute and offload in the replica" in problem.remedy


def _objects():
    """One unknown key in every kind of object that a plan has."""
    optional = {
        "groups[0].recompute": (["groups", 0, "recompute"], {"mode": "full"}),
        "groups[0].offload": (["groups", 0, "offload"], {}),
        "groups[0].replicas[1].parts": (["groups", 0, "replicas", 1, "parts"], {}),
        "chunks[0].hop": (["chunks", 0, "hop"], {"latency": 0, "load": 0}),
        "cluster": (["cluster"], {}),
        "predictions": (["predictions"], {}),
    }
    for where, (path, value) in optional.items():
        yield where, spoil(path, {**value, "qqq": 1})
    present = {
        "top level": [],
        "model": ["model"],
        "groups[0]": ["groups", 0],
        "groups[0].replicas[1]": ["groups", 0, "replicas", 1],
        "chunks[2]": ["chunks", 2],
        "schedule": ["schedule"],
    }
    for where, path in present.items():
        yield where, spoil([*path, "qqq"], 1)


def _classes(hint):
    if dataclasses.is_dataclass(hint):
        return {hint}.union(*(_classes(inner) for inner in get_type_hints(hint).values()))
    return set().union(*(_classes(part) for part in get_args(hint)))


def test_unknown_keys_are_found_in_every_object():
    objects = dict(_objects())
    assert len(objects) == len(_classes(Plan))
    for where, plan in objects.items():
        problem = only_problem(plan)
        assert (problem.where, problem.found) == (f"plan.json: {where}", 'unknown key "qqq"')


def test_schedule_name_with_suggestion():
    problem = only_problem(spoil(["schedule", "name"], "breadth-first"))
    assert problem.expected == "'1f1b', 'interleaved' or 'breadth_first'"
    assert problem.remedy == "Did you mean 'breadth_first'?"


def test_newer_version_is_the_only_problem():
    plan = spoil(["schema_version"], 2)
    plan["something new"] = 1
    problem = only_problem(plan)
    assert problem.where == "plan.json: schema_version"
    assert "written by a newer version" in problem.found


@pytest.mark.parametrize("version", [0, -1])
def test_version_that_never_was(version):
    assert "never existed" in only_problem(spoil(["schema_version"], version)).found


def test_several_structural_errors_at_once():
    plan = spoil(["groups", 1, "replicas", 0, "num_microbatches"], True)
    plan["global_batch_size"] = "24"
    plan["chunks"][0]["layer"] = plan["chunks"][0].pop("layers")
    del plan["schedule"]
    assert {(problem.where, problem.found) for problem in problems(plan)} == {
        ("plan.json: groups[1].replicas[0].num_microbatches", "true (a boolean)"),
        ("plan.json: global_batch_size", '"24" (a string)'),
        ("plan.json: chunks[0]", 'unknown key "layer"'),
        ("plan.json: chunks[0]", 'no key "layers"'),
        ("plan.json: top level", 'no key "schedule"'),
    }


def test_rules_are_checked_in_spite_of_unknown_keys():
    plan = spoil(["comment"], "by hand")
    plan["chunks"][0]["note"] = "x"
    plan["chunks"][2]["layers"] = [8, 12]
    assert [problem.found for problem in problems(plan)] == [
        'unknown key "note"',
        'unknown key "comment"',
        "layer 7 in no chunk",
    ]


def test_long_values_are_cut():
    problem = only_problem(spoil(["model"], list(range(1000))))
    assert len(problem.found) < 100


@pytest.mark.slow
@given(plans(with_options=True))
def test_the_error_lists_all_problems(plan):
    text = dump_plan(plan).replace('"schedule"', '"schedules"').replace('"chunks"', '"chunk"')
    found = problems_in(text.encode())
    message = str(PlanError("title", found))
    assert len(found) == 4
    assert all(str(problem) in message for problem in found)
