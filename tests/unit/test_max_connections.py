"""Reductions within a backward need a hardware queue for each stream."""

import pytest

from tests.unit.made_plans import even_plan
from zorse_megatron import pretrain
from zorse_megatron.errors import FlagError
from zorse_megatron.launch.rank_environment import VARIABLE, queue_environment, queue_problems
from zorse_megatron.plan.plan_file import save_plan


def test_as_many_as_there_are_unless_the_user_has_chosen():
    assert queue_environment({}) == {VARIABLE: "32"}
    assert queue_environment({VARIABLE: "1"}) == {}


@pytest.mark.parametrize(
    ("value", "overlaps", "refused"),
    [
        ("1", True, True),
        ("8", True, True),
        ("10", True, False),
        (None, True, False),
        ("1", False, False),
    ],
)
def test_fewer_queues_than_streams_are_refused(value, overlaps, refused):
    """The middle of three stages of two: the world, its group, four links, and four streams."""
    environment = {} if value is None else {VARIABLE: value}
    problems = queue_problems(even_plan(3, 2, 4), environment, overlaps_reductions=overlaps)
    assert bool(problems) == refused
    if refused:
        assert problems[0].found == f"{VARIABLE}={value} and 10 streams on the busiest rank"


def test_without_messages_between_groups_there_is_nothing_to_wait_for():
    assert not queue_problems(even_plan(1, 4, 4), {VARIABLE: "1"}, overlaps_reductions=True)


def test_a_run_is_refused_before_it_imports_torch(tmp_path, monkeypatch):
    save_plan(even_plan(3, 2, 4), tmp_path / "plan.json")
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    flags = ["--zorse-plan", str(tmp_path / "plan.json"), "--overlap-grad-reduce"]
    flags += ["--eval-interval", "9"]
    with pytest.raises(FlagError, match="as many hardware queues as streams"):
        pretrain.run(flags)
