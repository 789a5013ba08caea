import dataclasses
import json

import pytest
from hypothesis import given

from tests.strategies import plans
from tests.unit.plan_samples import good, load
from zorse_megatron.errors import PlanError
from zorse_megatron.files.read_write import NotWritten
from zorse_megatron.plan.plan import Predictions, Schedule
from zorse_megatron.plan.plan_file import dump_plan, fingerprint, load_plan, parse_plan, save_plan

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
  "schema_version": 1,
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
