"""Where Megatron's schedules post receives, and wait for gradients to have left.

Expected are the calls of `forward_backward_pipelining_with_interleaving` (Megatron-Core 0.19.2),
read off its source for two ranks with two virtual stages each and four micro-batches.
"""

from dataclasses import replace

import pytest

from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.schedule.actions import COMPUTE, RECEIVES, TRANSFERS, Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.transfers import (
    gradient_closings,
    with_receives_at_last,
    with_receives_posted,
)

PLAN = Plan(
    schema_version=1,
    global_batch_size=4,
    model=ModelFingerprint(num_layers=4),
    groups=tuple(
        Group(
            replicas=(
                Replica(ranks=(rank,), micro_batch_size=1, num_microbatches=4, shard_weight=1.0),
            )
        )
        for rank in range(2)
    ),
    chunks=tuple(Chunk(group=at % 2, layers=(at, at + 1)) for at in range(4)),
    schedule=Schedule(name="interleaved"),
)
# Computations, and with R the receives for them.
POSTED = (
    "0F0 0F1 R2F0 2F0 R2F1 2F1 R2B0 0F2 2B0 R2B1 0F3 R2F2 2B1 R0B0 2F2 R2F3 0B0 R0B1 2F3 0B1 "
    "R2B2 R2B3 2B2 R0B2 2B3 R0B3 0B2 0B3",
    "R1F0 R1F1 1F0 R3F0 1F1 3F0 R3F1 3B0 3F1 R1F2 3B1 R1B0 1F2 R1F3 1B0 R1B1 1F3 R3F2 1B1 3F2 "
    "R3F3 3B2 3F3 3B3 R1B2 1B2 R1B3 1B3",
)


def passes_of(rank):
    return lower_plan(PLAN).ranks[rank]


def word(action):
    if action.kind in RECEIVES:
        kind = "F" if action.kind is Kind.RECEIVE_ACTIVATION else "B"
        return f"R{action.chunk}{kind}{action.micro_batch}"
    return str(action)


@pytest.mark.parametrize("rank", [0, 1])
def test_receives_are_posted_where_megatron_does(rank):
    before = passes_of(rank)
    posted = with_receives_posted(before)
    wanted = COMPUTE | RECEIVES
    assert " ".join(word(each) for each in posted if each.kind in wanted) == POSTED[rank]
    others = [[a for a in actions if a.kind not in RECEIVES] for actions in (before, posted)]
    assert others[0] == others[1]


def test_1f1b_receives_what_is_computed_next():
    """The second of four stages: two forwards to warm up, then one each, then two backwards."""
    stages = tuple(
        replace(PLAN.groups[0], replicas=(replace(PLAN.groups[0].replicas[0], ranks=(rank,)),))
        for rank in range(4)
    )
    chunks = tuple(replace(chunk, group=at) for at, chunk in enumerate(PLAN.chunks))
    plan = replace(PLAN, groups=stages, chunks=chunks, schedule=Schedule(name="1f1b"))
    found = with_receives_at_last(lower_plan(plan).ranks[1])
    words = [word(each).split(">")[0] for each in found if each.kind in COMPUTE | TRANSFERS]
    assert " ".join(words) == (
        "R1F0 1F0 1SA0 R1F1 1F1 1SA1 R1F2 1F2 1SA2 R1B0 1B0 1SG0 R1F3 1F3 1SA3 R1B1 1B1 1SG1 "
        "R1B2 1B2 1SG2 R1B3 1B3 1SG3"
    )


def test_a_gradient_has_left_when_the_next_one_was_sent():
    actions = with_receives_posted(passes_of(1))
    closings = {str(actions[s]): str(actions[at]) for s, at in gradient_closings(actions).items()}
    found = {send.split(">")[0]: closed for send, closed in closings.items()}
    assert found == {
        **{"3SG0": "1F2", "3SG1": "1F3", "1SG0": "3F2", "1SG1": "3F3"},
        **{"3SG2": "1B2", "3SG3": "1B3", "1SG2": "NORM", "1SG3": "NORM"},
    }


def test_what_has_no_backward_stays():
    lists = lower_plan(PLAN, forward_only=True)
    assert with_receives_posted(lists.ranks[1]) == tuple(lists.ranks[1])
    assert with_receives_at_last(lists.ranks[1]) == tuple(lists.ranks[1])
