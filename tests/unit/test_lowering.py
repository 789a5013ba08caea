"""What lists of every schedule promise, on random plans with several chunks per group."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.action_words import parse_action_lists
from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.made_plans import plan_of, replica
from tests.unit.simulation import run
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionLists,
    Kind,
    from_norm,
)
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import rank_micro_batches
from zorse_megatron.schedule.validate import ScheduleError, check_executable, executes_in_order

COLLECTIVES = {Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.SCALE, Kind.NORM, Kind.TIE}
EVERY_SCHEDULE = ("breadth_first", "breadth_first", "interleaved")

any_plan = st.one_of(plans(), lowerable_plans(schedule_names=EVERY_SCHEDULE))


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(300))
@given(plan=any_plan, forward_only=st.booleans(), tied=st.booleans())
def test_what_holds_of_all_lists(plan: Plan, forward_only: bool, tied: bool) -> None:
    """They can be executed even if all transfers and collectives block; each computation once and
    micro-batches in order; collectives in one order on all ranks of a group."""
    lists = lower_plan(plan, forward_only=forward_only, tied=tied)
    check_executable(lists)
    assert parse_action_lists(str(lists)) == lists
    assert set(sent_in(lists).values()) <= {1}
    assert set(sent_in(lists)) == crossing_of(plan, forward_only=forward_only)
    for rank, actions in enumerate(lists.ranks):
        count = len(rank_micro_batches(plan, rank))
        for chunk in plan.chunks_of_group(plan.group_of_rank(rank)):
            for kind in COMPUTE:
                found = [a.micro_batch for a in actions if a.kind is kind and a.chunk == chunk]
                skipped = forward_only and kind is Kind.BACKWARD
                assert found == ([] if skipped else list(range(count)))
    for group in plan.groups:
        orders = {
            tuple(a for a in lists.ranks[rank] if a.kind in COLLECTIVES) for rank in group.ranks
        }
        assert len(orders) == 1


def sent_in(lists: ActionLists) -> Counter[tuple[Kind, int, int]]:
    """How often each sample of a chunk is sent and received."""
    sent: Counter[tuple[Kind, int, int]] = Counter()
    for rank, actions in enumerate(lists.ranks):
        for a in actions:
            if a.kind in SENDS | RECEIVES:
                assert a.samples is not None and a.peer != rank
                sent.update((a.kind, a.chunk, sample) for sample in range(*a.samples))
    return sent


def crossing_of(plan: Plan, *, forward_only: bool) -> set[tuple[Kind, int, int]]:
    """Samples that have to cross boundaries between groups, there and back."""
    return {
        (kind, chunk, sample)
        for lower in range(len(plan.chunks) - 1)
        if plan.chunks[lower].group != plan.chunks[lower + 1].group
        for kind, chunk in (
            (Kind.SEND_F, lower),
            (Kind.RECV_F, lower + 1),
            *(() if forward_only else ((Kind.SEND_B, lower + 1),)),
            *(() if forward_only else ((Kind.RECV_B, lower),)),
        )
        for sample in range(plan.global_batch_size)
    }


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(100))
@given(plan=any_plan)
def test_the_simulator_runs_them_and_gives_back_what_it_took(plan: Plan) -> None:
    memory = FakeMemory(boundary=7, head=11, embedding_count=128)
    comm = FakeComm(bytes_per_s=3000.0, latency_s=0.1, host_bytes_per_s=2000.0)
    result = run(plan, memory=memory, comm=comm)
    for rank, actions in enumerate(lower_plan(plan).ranks):
        assert [span.action for span in result.spans(rank)] == list(map(str, from_norm(actions)))
        steps = result.memory_over_time(rank)
        assert steps[-1].by_category_bytes == steps[0].by_category_bytes
        assert all(min(step.by_category_bytes) >= 0 for step in steps)


def lists_of(*words: str) -> ActionLists:
    return parse_action_lists("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(words)))


def test_collectives_in_different_orders_are_stuck() -> None:
    broken = lists_of("0UNSHARD 1UNSHARD", "1UNSHARD 0UNSHARD")
    with pytest.raises(
        ScheduleError, match=r"no rank can proceed[\s\S]*»0UNSHARD«[\s\S]*»1UNSHARD«"
    ):
        check_executable(broken)


def test_a_collective_that_holds_back_a_transfer_is_found() -> None:
    """Rank 1 comes to the gather only with what rank 0 sends after it."""
    words = ("0UNSHARD 0F0 0SEND_F0>2[0:1]", "0UNSHARD", "1RECV_F0<0[0:1] 1F0")
    check_executable(lists_of(*words))
    waiting = (words[0], "1RECV_F0<2[1:2] 1F0 0UNSHARD", "1RECV_F0<0[0:1] 1F0 1SEND_F0>1[1:2]")
    with pytest.raises(ScheduleError, match="no rank can proceed"):
        check_executable(lists_of(*waiting))


def test_a_chunk_before_its_input_on_the_same_rank_is_found() -> None:
    for words in ("1F0 0F0", "0F0 1F0 0B0 1B0", "0F0 1B0 1F0 0B0"):
        with pytest.raises(ScheduleError, match="before what it consumes"):
            check_executable(lists_of(words))
    check_executable(lists_of("0F0 1F0 1B0 0B0"))


def test_backwards_may_wait_for_earlier_samples_of_other_ranks() -> None:
    """Rank 0 has samples 0 and 2, rank 1 has 1 and 3."""
    plan = plan_of([replica(0, count=2), replica(1, count=2)])
    usual = "0F0 0B0 0F1 0B1"
    assert executes_in_order(plan, lists_of(usual, usual))
    assert executes_in_order(plan, lists_of("0F0 0F1 0B1 0B0", usual))
    assert not executes_in_order(plan, lists_of("0F1 0B1 0F0 0B0", usual))
    # Rank 0 comes to sample 0 only after what waits for it.
    late = lists_of(f"0UNSHARD {usual}", "0F0 0B0 0UNSHARD 0F1 0B1")
    check_executable(late)
    assert not executes_in_order(plan, late)
    assert executes_in_order(plan, lists_of(f"0UNSHARD {usual}", "0F0 0UNSHARD 0B0 0F1 0B1"))


def test_every_rank_of_a_collective_counts_once_for_each_time() -> None:
    actions = (Action(kind=Kind.UNSHARD, chunk=0), Action(kind=Kind.RESHARD, chunk=0))
    check_executable(ActionLists(ranks=(actions * 3, actions * 3)))
    with pytest.raises(ScheduleError, match=r"rank 1 at 4: .*\(done\)"):
        check_executable(ActionLists(ranks=(actions * 3, actions * 2)))
