import dataclasses

import pytest
from hypothesis import given
from pydantic import ValidationError

from tests.strategies import plans
from tests.unit.plan_samples import good, load
from zorse_megatron.plan.plan import Chunk, Replica


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
