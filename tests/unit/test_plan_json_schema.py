import json
from importlib import resources

import pytest
from hypothesis import given
from jsonschema import Draft202012Validator

from tests.strategies import plans
from tests.unit.plan_samples import good, problems
from zorse_megatron.schema.plan.json_schema import json_schema, json_schema_text
from zorse_megatron.schema.plan.plan_json import dump_plan

VALIDATOR = Draft202012Validator(json_schema())


def test_the_schema_is_a_schema():
    Draft202012Validator.check_schema(json_schema())


def test_the_committed_file_is_current():
    committed = (
        resources.files("zorse_megatron.schema.plan").joinpath("plan.schema.json").read_text()
    )
    assert committed == json_schema_text(), (
        "write json_schema_text() to zorse_megatron/schema/plan/plan.schema.json"
    )


def test_every_field_is_described():
    schema = json_schema()
    for owner in (schema, *schema["$defs"].values()):
        assert all("description" in field for field in owner["properties"].values())


@pytest.mark.slow
@given(plans(with_options=True, max_chunks_per_group=2, max_ranks_per_replica=2))
def test_good_plans_validate(plan):
    VALIDATOR.validate(json.loads(dump_plan(plan)))


def spoilt():
    def change(*path_and_value):
        *path, last, value = path_and_value
        plan = good()
        owner = plan
        for item in path:
            owner = owner[item]
        owner[last] = value
        return plan

    replica = ("groups", 0, "replicas", 0)
    yield "unknown key", change("chunks", 0, "layer", 1)
    yield "string for integer", change("global_batch_size", "24")
    yield "boolean for integer", change(*replica, "num_microbatches", True)
    yield "boolean for number", change(*replica, "shard_weight", True)
    yield "fraction for integer", change(*replica, "num_microbatches", 1.5)
    yield "negative count", change(*replica, "num_microbatches", -1)
    yield "negative weight", change(*replica, "shard_weight", -1)
    yield "no replicas", change("groups", 0, "replicas", [])
    yield "no ranks", change(*replica, "ranks", [])
    yield "three numbers", change("chunks", 0, "layers", [0, 1, 2])
    yield "one number", change("chunks", 0, "layers", [0])
    yield "unknown schedule", change("schedule", "name", "zigzag")
    yield "parameter that is a list", change("schedule", "parameters", {"depth": []})
    yield "other version", change("schema_version", 2)
    yield "not an object", [good()]
    missing = good()
    del missing["model"]
    yield "missing key", missing


@pytest.mark.parametrize(("plan"), [pytest.param(plan, id=name) for name, plan in spoilt()])
def test_structural_errors_do_not_validate(plan):
    assert not VALIDATOR.is_valid(plan)
    assert problems(plan)
