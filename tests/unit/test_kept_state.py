"""Optimizer state that stays on GPUs with room for it, of plans in which it waits in the host."""

from dataclasses import replace

import pytest

from tests.unit.test_overlapped_experts import LARGE
from tests.unit.test_shared_experts import evaluated, plan_of, sharing
from tests.unit.test_stock_expert_parallel import ONE_NODE, inputs_of
from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import Offload, Replica
from zorse_megatron.planner.search.kept_state import with_state_kept
from zorse_megatron.schedule import shards

MANY, ENDING_SHORT = 40, 6.1
"""Pieces of a rank's state; the last one of few is a tenth of the others."""


def alone(ranks):
    return [
        Replica(ranks=(rank,), micro_batch_size=2, num_microbatches=4, shard_weight=1.0)
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("pieces", "room"),
    [(MANY, 0.0), (MANY, 0.1), (MANY, 0.55), (MANY, 2.0), (ENDING_SHORT, 0.43)],
)
@pytest.mark.parametrize("way", ["alone", "shared"])
def test_as_much_stays_as_there_is_room_for(monkeypatch, way, pieces, room):
    """No other fraction of a hundred that fits is faster; `room`: in parts of a rank's state."""
    inputs = inputs_of(ONE_NODE, LARGE, batch=32)
    state = LARGE.num_parameters // 4
    monkeypatch.setattr(shards, "STATE_PIECE_ELEMENTS", int(state / pieces))
    replicas = alone(range(4)) if way == "alone" else [sharing(range(4), (4,) * 4, (2,) * 4, 4)]
    plan = plan_of(inputs, *replicas)
    group = replace(plan.groups[0], offload=Offload(optimizer_state=True))
    plan = replace(plan, groups=(group,))
    free = evaluated(inputs).evaluate_plan(plan).overflow_bytes[0]
    capacity = inputs.capacities_bytes[0] + free + round(room * 12 * state)
    inputs = replace(inputs, capacities_bytes=(capacity,) * 4)
    evaluator = evaluated(inputs)
    before = evaluator.evaluate_plan(plan)
    found = with_state_kept(evaluator, before)
    assert found.fits
    (there,) = found.plan.groups
    offloads = [settings_in(there, each).offload for each in there.replicas]
    assert [each.optimizer_state for each in offloads] == [room < 1] * len(replicas)
    others = []
    for percent in range(1, 101):
        offload = Offload(optimizer_state=True, optimizer_state_fraction=percent / 100)
        other = replace(plan, groups=(replace(group, offload=offload),))
        others.append(evaluator.evaluate_plan(other))
    fastest = min(each.iteration_s for each in others if each.fits)
    moved_s = before.iteration_s - min(each.iteration_s for each in others)
    assert found.iteration_s <= fastest + 2 * moved_s / pieces * (room < 1)
    assert (found.iteration_s < before.iteration_s) == (room > 0)
    drawn = replace(before, iteration_s=0.9 * found.iteration_s, is_extrapolated=True)
    assert with_state_kept(evaluator, drawn).iteration_s == found.iteration_s
