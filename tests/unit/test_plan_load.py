"""What the table of bad input cannot say of plan files: properties, and texts that are no JSON."""

import dataclasses
import json
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.strategies import plans
from tests.unit.plan_samples import good, load, only_problem, problems, problems_in
from tests.unit.test_bad_input import ROWS
from zorse_megatron.errors import PlanError
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.plan.rules import problems_of

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
