"""The strategy for plans draws valid plans, and the odd ones that tests need."""

from random import Random

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tests.strategies import plans
from zorse_megatron.plan.rules import problems_of

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
