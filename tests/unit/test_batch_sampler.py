"""Replicas of a group together read every global batch, in order, over any number of epochs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import plans
from zorse_megatron.plan.plan import Plan
from zorse_megatron.runtime.batch_sampler import Course, PlanBatchSampler
from zorse_megatron.schedule.samples import replica_micro_batches


@pytest.mark.slow
@given(plan=plans(max_world=6), epoch=st.integers(1, 40), size=st.integers(1, 5), data=st.data())
def test_replicas_partition_each_global_batch(
    plan: Plan, epoch: int, size: int, data: st.DataObject
) -> None:
    """Epochs need not be multiples of the global batch, nor the stock batches of anything."""
    epochs = data.draw(st.integers(1, 4))
    order = [list(range(epoch))[i : i + size] for i in range(0, epoch, size)]
    stream = list(range(epoch)) * epochs
    steps = len(stream) // plan.global_batch_size
    for group in plan.groups:
        read: dict[tuple[int, int], int] = {}
        for rank in group.ranks:
            mine = replica_micro_batches(plan, rank)
            sampler = PlanBatchSampler(
                order, global_batch_size=plan.global_batch_size, course=Course(mine)
            )
            batches = [batch for _ in range(epochs) for batch in sampler]
            assert len(batches) == steps * len(mine)
            for number, batch in enumerate(batches):
                step, micro_batch = divmod(number, len(mine))
                for offset, index in enumerate(batch):
                    read[step, mine[micro_batch].start + offset] = index
        expected = {
            divmod(position, plan.global_batch_size): index
            for position, index in enumerate(stream[: steps * plan.global_batch_size])
        }
        assert read == expected
