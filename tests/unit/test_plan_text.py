"""What the loader refuses before it looks at the plan: files, encoding, JSON syntax."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.plan_samples import good, load, problems_in, spoil
from zorse_megatron.errors import PlanError
from zorse_megatron.schema.plan.plan_json import dump_plan, load_plan

TEXT = dump_plan(load(good()))

# Files


def test_missing_file(tmp_path):
    with pytest.raises(PlanError) as caught:
        load_plan(tmp_path / "plan.json")
    (problem,) = caught.value.problems
    assert problem.where == str(tmp_path / "plan.json")
    assert "No such file" in problem.found


def test_directory(tmp_path):
    with pytest.raises(PlanError, match="Is a directory"):
        load_plan(tmp_path)


def test_file_is_named_in_every_problem(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(spoil(["chunks", 0, "group"], 9)))
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert len(caught.value.problems) == 2
    assert all(problem.where.startswith(f"{path}: ") for problem in caught.value.problems)


# Text


def test_not_utf8():
    (problem,) = problems_in(TEXT.encode("utf-16"))
    assert "0xff, which is not UTF-8" in problem.found
    assert problem.where == "plan.json: byte 0"


def test_byte_order_mark_is_fine():
    assert problems_in(TEXT.encode("utf-8-sig")) == ()


@pytest.mark.parametrize("data", [b"", b"  \n"])
def test_empty_file(data):
    (problem,) = problems_in(data)
    assert problem.found == "an empty file"


def test_truncated_json_says_where():
    (problem,) = problems_in(b'{"schema_version": 1,\n "glob')
    assert problem.where == "plan.json: line 2 column 6"
    assert "looks cut off" in problem.found


@given(st.integers(1, len(TEXT.rstrip()) - 1))
def test_every_truncation_is_recognised(length):
    (problem,) = problems_in(TEXT[:length].encode())
    assert "looks cut off" in problem.found


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"a": 1,}', "line 1 column 9"),
        ('{\n"a": 1 // one\n}', "line 2 column 8"),
        ("{'a': 1}", "line 1 column 2"),
        ('{"a": 1} {', "line 1 column 10"),
    ],
)
def test_text_that_is_not_json(text, place):
    (problem,) = problems_in(text.encode())
    assert problem.where == f"plan.json: {place}"
    assert "not JSON" in problem.found
    assert "cut off" not in problem.found


def test_duplicate_keys_at_any_depth():
    text = TEXT.replace('"ranks": [2]', '"ranks": [7], "ranks": [2]')
    text = text.replace('"schedule":', '"chunks": [], "schedule":', 1)
    found = {(problem.where, problem.found) for problem in problems_in(text.encode())}
    assert ("plan.json: groups[1].replicas[0]", 'key "ranks" more than once') in found
    assert ("plan.json: top level", 'key "chunks" more than once') in found


@given(st.binary(max_size=40))
def test_any_bytes_give_problems_and_nothing_else(data):
    assert problems_in(data)
