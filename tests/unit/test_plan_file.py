"""Plan files: read and written, their rules, their JSON schema, and random ones."""

import dataclasses
import json
import re
from importlib import resources
from random import Random
from typing import get_args, get_type_hints

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter, ValidationError

from tests.strategies import plans
from tests.unit.plan_samples import good, load, only_problem, problems, problems_in
from tests.unit.test_bad_input import ROWS, file_of
from zorse_megatron.errors import PlanError
from zorse_megatron.files.read_write import NotWritten
from zorse_megatron.plan.plan import Chunk, Plan, Predictions, Replica, Schedule
from zorse_megatron.plan.plan_file import (
    dump_plan,
    fingerprint,
    json_schema,
    json_schema_text,
    load_plan,
    parse_plan,
    save_plan,
)
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.plan.spans import gaps, overlaps, spans_of, spell


def test_helpers_of_the_sample():
    plan = load(good())
    assert plan.world_size == 5
    assert plan.groups[2].ranks == (4, 3)
    assert [plan.group_of_rank(rank) for rank in range(5)] == [0, 0, 1, 2, 2]
    assert plan.replica_of_rank(3) == (2, 1)
    assert plan.chunks_of_group(1) == (1,)
    assert [replica.num_samples for replica in plan.groups[0].replicas] == [16, 8]


@pytest.mark.slow
@given(plans(max_chunks_per_group=3, max_ranks_per_replica=2))
def test_helpers_agree_with_the_lists(plan):
    assert sorted(rank for group in plan.groups for rank in group.ranks) == list(
        range(plan.world_size)
    )
    for rank in range(plan.world_size):
        group, replica = plan.replica_of_rank(rank)
        assert rank in plan.groups[group].replicas[replica].ranks
    for index, chunk in enumerate(plan.chunks):
        assert index in plan.chunks_of_group(chunk.group)
    assert sum(len(plan.chunks_of_group(g)) for g in range(len(plan.groups))) == len(plan.chunks)


def test_what_is_not_in_the_plan_is_refused():
    plan = load(good())
    with pytest.raises(ValueError, match="rank 5 is in no group; the plan has ranks 0 to 4"):
        plan.replica_of_rank(5)
    for group in (-1, 3):
        with pytest.raises(ValueError, match=f"no group {group}; the plan has groups 0 to 2"):
            plan.chunks_of_group(group)


def test_plans_are_frozen_and_hashable():
    plan = load(good())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.global_batch_size = 8
    assert hash(plan) == hash(load(good()))


def test_nothing_is_converted_in_python_either():
    with pytest.raises(ValidationError):
        Replica(ranks=(0,), micro_batch_size=True, num_microbatches=1, shard_weight=1.0)
    with pytest.raises(ValidationError):
        Chunk(group=0, layers=(0.0, 1.0))
    with pytest.raises(ValidationError):
        dataclasses.replace(load(good()), schema_version=True)


# Read.

TEXT = dump_plan(load(good()))


def test_not_utf8():
    (problem,) = problems_in(TEXT.encode("utf-16"))
    assert "0xff, which is not UTF-8" in problem.found
    assert problem.where == "plan.json: byte 0"


def test_byte_order_mark_is_fine():
    assert problems_in(TEXT.encode("utf-8-sig")) == ()


@given(st.integers(1, len(TEXT.rstrip()) - 1))
def test_every_truncation_is_recognised(length):
    (problem,) = problems_in(TEXT[:length].encode())
    assert "looks cut off" in problem.found


def test_duplicate_keys_at_any_depth():
    text = TEXT.replace('"ranks": [2]', '"ranks": [7], "ranks": [2]')
    text = text.replace('"schedule":', '"chunks": [], "schedule":', 1)
    found = {(problem.where, problem.found) for problem in problems_in(text.encode())}
    assert ("plan.json: groups[1].replicas[0]", 'key "ranks" more than once') in found
    assert ("plan.json: top level", 'key "chunks" more than once') in found


@given(st.binary(max_size=40))
def test_any_bytes_give_problems_and_nothing_else(data):
    assert problems_in(data)


def test_null_is_absent():
    plan = good()
    plan["cluster"] = plan["predictions"] = plan["groups"][0]["recompute"] = None
    assert load(plan) == load(good())


def _classes(hint):
    if dataclasses.is_dataclass(hint):
        return {hint}.union(*(_classes(inner) for inner in get_type_hints(hint).values()))
    return set().union(*(_classes(part) for part in get_args(hint)))


def test_the_table_has_an_unknown_key_in_every_object():
    owners = {said[0].partition(": found")[0] for _, _, said in ROWS if '"qqq"' in said[0]}
    assert len(owners) == len(_classes(Plan))


@pytest.mark.slow
@given(plans(with_options=True))
def test_the_error_lists_all_problems(plan):
    text = dump_plan(plan).replace('"schedule"', '"schedules"').replace('"chunks"', '"chunk"')
    found = problems_in(text.encode())
    message = str(PlanError("title", found))
    assert len(found) == 4
    assert all(str(problem) in message for problem in found)


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


# Written.

ANY_PLAN = plans(with_options=True, max_chunks_per_group=3, max_ranks_per_replica=2)


@pytest.mark.slow
@given(ANY_PLAN)
def test_what_is_dumped_loads_back_equal(plan):
    text = dump_plan(plan)
    again = parse_plan(text.encode())
    assert again == plan
    assert dump_plan(again) == text
    assert fingerprint(again) == fingerprint(plan)


@pytest.mark.slow
@given(ANY_PLAN)
def test_dump_leaves_out_what_is_none(plan):
    def nulls(value):
        if isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            return sum(map(nulls, inner))
        return value is None

    assert nulls(json.loads(dump_plan(plan))) == 0


def test_canonical_text():
    plan = good()
    del plan["groups"][1:], plan["chunks"][1:]
    plan["chunks"][0]["layers"] = [0, 12]
    plan["predictions"] = {"peak_memory_bytes": [1, 2]}
    assert (
        dump_plan(load(plan))
        == """\
{
  "schema_version": 2,
  "global_batch_size": 24,
  "model": {"num_layers": 12},
  "groups": [
    {
      "name": "a",
      "replicas": [
        {"ranks": [0], "micro_batch_size": 4, "num_microbatches": 4, "shard_weight": 3.0},
        {"ranks": [1], "micro_batch_size": 2, "num_microbatches": 4, "shard_weight": 1.0}
      ]
    }
  ],
  "chunks": [{"group": 0, "layers": [0, 12]}],
  "schedule": {"name": "1f1b", "parameters": {}},
  "predictions": {"peak_memory_bytes": [1, 2]}
}
"""
    )


def reordered(value):
    """The same JSON with the keys of every object in reverse order."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def test_equal_plans_have_one_text_and_one_fingerprint():
    other = reordered(good())
    assert list(other) != list(good())
    other["groups"][0]["replicas"][0]["shard_weight"] = 3  # An integer for 3.0.
    other["cluster"] = None
    assert load(other) == load(good())
    assert dump_plan(load(other)) == dump_plan(load(good()))
    assert fingerprint(load(other)) == fingerprint(load(good()))


def test_schedule_parameters_are_sorted():
    def plan(**parameters):
        schedule = Schedule(name="1f1b", parameters=parameters)
        return dataclasses.replace(load(good()), schedule=schedule)

    assert (
        fingerprint(plan(a="1", b="2"))
        == fingerprint(plan(b="2", a="1"))
        != fingerprint(plan(a="1"))
    )


def test_negative_zero_has_no_text_of_its_own():
    positive, negative = good(), good()
    positive["groups"][0]["replicas"][1]["shard_weight"] = 0.0
    negative["groups"][0]["replicas"][1]["shard_weight"] = -0.0
    assert fingerprint(load(negative)) == fingerprint(load(positive))


def test_fingerprint_ignores_predictions_and_nothing_else():
    plan = load(good())
    assert len(fingerprint(plan)) == 16
    predicted = dataclasses.replace(plan, predictions=Predictions(iteration_s=2.0))
    assert fingerprint(predicted) == fingerprint(plan)
    batch = dataclasses.replace(plan, global_batch_size=25)
    renamed = dataclasses.replace(
        plan, groups=(dataclasses.replace(plan.groups[0], name="b"), *plan.groups[1:])
    )
    assert len({fingerprint(each) for each in (plan, batch, renamed)}) == 3


def test_save_and_load(tmp_path):
    path = tmp_path / "plan.json"
    save_plan(load(good()), path)
    assert load_plan(path) == load_plan(str(path)) == load(good())
    assert path.read_text() == dump_plan(load(good()))
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    save_plan(load(good()), path)

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    new = dataclasses.replace(load(good()), predictions=Predictions())
    with pytest.raises(NotWritten, match="No space") as caught:
        save_plan(new, path)
    assert caught.value.kept.read_text() == dump_plan(new)
    caught.value.kept.unlink()
    assert path.read_text() == dump_plan(load(good()))
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_could_not_be_loaded_is_not_saved(tmp_path):
    with pytest.raises(PlanError, match="global_batch_size = 25"):
        save_plan(dataclasses.replace(load(good()), global_batch_size=25), tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


# The schema.

VALIDATOR = Draft202012Validator(json_schema())


def test_the_schema_is_a_schema():
    Draft202012Validator.check_schema(json_schema())


def test_the_committed_file_is_current():
    committed = resources.files("zorse_megatron.plan").joinpath("plan.schema.json").read_text()
    assert committed == json_schema_text(), (
        "write json_schema_text() to zorse_megatron/plan/plan.schema.json"
    )


def test_every_field_is_described():
    schema = json_schema()
    for owner in (schema, *schema["$defs"].values()):
        assert all("description" in field for field in owner["properties"].values())


@pytest.mark.slow
@given(plans(with_options=True, max_chunks_per_group=2, max_ranks_per_replica=2))
def test_good_plans_validate(plan):
    VALIDATOR.validate(json.loads(dump_plan(plan)))


def test_what_is_refused_does_not_validate():
    """But for what JSON Schema takes for an integer, and numbers that JSON does not have."""
    refused = [
        json.loads(file_of(section, given))
        for section, given, said in ROWS
        if section == "plan" and said != ["OK"]
        if not re.search(r"^file|\.0$|NaN|Infinity", given[0])
    ]
    assert len(refused) > 40
    assert not [plan for plan in refused if VALIDATOR.is_valid(plan)]


# Spans of layers.

SPANS = st.lists(st.tuples(st.integers(-4, 12), st.integers(-4, 12)))


def numbers(spans):
    return [number for span in spans for number in range(*span)]


def is_tidy(spans):
    """Sorted, none empty, no two that touch."""
    ends = [end for span in spans for end in span]
    return ends == sorted(set(ends))


@given(SPANS, st.integers(0, 12))
def test_gaps_are_the_numbers_in_no_span(spans, stop):
    covered = set(numbers(spans))
    found = gaps(spans, stop)
    assert numbers(found) == [number for number in range(stop) if number not in covered]
    assert is_tidy(found)


@given(SPANS)
def test_overlaps_are_the_numbers_in_two_spans_or_more(spans):
    covered = numbers(spans)
    found = overlaps(spans)
    assert numbers(found) == sorted({n for n in covered if covered.count(n) > 1})
    assert is_tidy(found)


@given(st.lists(st.integers(-9, 9)))
def test_spans_of_covers_exactly_the_numbers(wanted):
    found = spans_of(wanted)
    assert numbers(found) == sorted(set(wanted))
    assert is_tidy(found)


def test_spell_includes_both_ends():
    assert spell([(0, 1), (3, 6)]) == "0, 3 to 5"


def test_absurd_sizes_are_not_enumerated():
    assert gaps([(5, 7)], 10**18) == [(0, 5), (7, 10**18)]


# Random plans.

# No shrinking: that there is one is all we ask.
SEARCH = settings(max_examples=5_000, deadline=None, database=None, phases=[Phase.generate])
ALL_OPTIONS = {"with_options": True, "max_chunks_per_group": 3, "max_ranks_per_replica": 3}


@pytest.mark.slow
@given(plans())
def test_plans_are_valid(plan):
    assert problems_of(plan) == ()
    assert plan.world_size <= 8
    assert len(plan.groups) == len(plan.chunks) <= 4
    assert plan.schedule.name == "1f1b"
    assert all(len(replica.ranks) == 1 for group in plan.groups for replica in group.replicas)


@pytest.mark.slow
@given(plans(**ALL_OPTIONS))
def test_plans_with_all_options_are_valid(plan):
    assert problems_of(plan) == ()


@pytest.mark.slow
@given(plans(3, 2, num_layers=st.integers(2, 3), global_batch_size=7, min_groups=2))
def test_bounds_are_kept(plan):
    assert plan.world_size <= 3
    assert len(plan.groups) == 2
    assert plan.model.num_layers in (2, 3)
    assert plan.global_batch_size == 7


def work(group):
    return sorted((r.micro_batch_size, r.num_microbatches) for r in group.replicas)


ODD = {
    "sizes 3x1 + 1x2 + 0": lambda plan: any(
        {(3, 1), (1, 2)} < set(work(g)) and 0 in {r.num_microbatches for r in g.replicas}
        for g in plan.groups
    ),
    "idle replica with a shard": lambda plan: any(
        r.num_microbatches == 0 < r.shard_weight for g in plan.groups for r in g.replicas
    ),
    "busy replica without a shard": lambda plan: any(
        r.shard_weight == 0 < r.num_microbatches for g in plan.groups for r in g.replicas
    ),
    "ranks out of order": lambda plan: any(list(g.ranks) != sorted(g.ranks) for g in plan.groups),
    "groups out of model order": lambda plan: plan.chunks[0].group != 0,
    "2|1|2": lambda plan: (
        [len(plan.groups[chunk.group].replicas) for chunk in plan.chunks] == [2, 1, 2]
    ),
    "four groups": lambda plan: len(plan.groups) == 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_odd_plans_are_drawn(name):
    find(plans(), ODD[name], settings=SEARCH, random=Random(0))


@pytest.mark.slow
def test_several_chunks_per_group_are_drawn():
    def goes_back(plan):
        return [chunk.group for chunk in plan.chunks] == [0, 1, 0, 1]

    find(plans(max_chunks_per_group=2), goes_back, settings=SEARCH, random=Random(0))
