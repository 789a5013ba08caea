import json
import re
from importlib import resources

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from tests.strategies import plans
from tests.unit.test_bad_input import ROWS, file_of
from zorse_megatron.plan.plan_file import dump_plan, json_schema, json_schema_text

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
