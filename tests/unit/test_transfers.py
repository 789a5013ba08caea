"""Messages: where they may begin and end, and how long they are on their way."""

import dataclasses
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.action_words import parse_action_lists
from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.made_plans import dealt_out, even_plan
from tests.unit.simulation import run
from zorse_megatron.plan.plan import Plan, Schedule, TransferTime
from zorse_megatron.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    ActionLists,
    Kind,
)
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.micro_batch_order import Pipeline
from zorse_megatron.schedule.pipeline_schedules import policy_of
from zorse_megatron.schedule.samples import Boundaries
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at
from zorse_megatron.simulate.assumptions import Framework
from zorse_megatron.simulate.transfers import (
    gradients_waited_at,
    with_receives_at_last,
    with_receives_posted,
)

# Receives.

any_plan = st.one_of(plans(), lowerable_plans())


def test_two_computations_before_their_place():
    words = "0F0 0F1 0RECV_B0<1[0:1] 0B0 0F2 0RECV_B1<1[1:2] 0RECV_B2<1[2:3] 0B1 0B2"
    (actions,) = parse_action_lists(f"rank 0: {words}").ranks
    assert receives_posted_at(actions) == {2: 0, 5: 3, 6: 3}
    assert receives_posted_at(actions, ahead=1) == {2: 1, 5: 4, 6: 4}
    assert receives_posted_at(actions, ahead=0) == {2: 2, 5: 5, 6: 6}
    assert receives_posted_at(actions, ahead=9) == {2: 0, 5: 0, 6: 0}


def moved(actions: tuple[Action, ...], ahead: int) -> tuple[Action, ...]:
    """The list with its receives moved forward past so many computations."""
    computations = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
    places = {}
    for at, action in enumerate(actions):
        places[at] = at, 1
        if action.kind in RECEIVES:
            passed = sum(computation < at for computation in computations)
            places[at] = (computations[passed - ahead] if passed >= ahead else 0), 0
    return tuple(actions[at] for at in sorted(places, key=lambda at: (places[at], at)))


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(plan=any_plan, ahead=st.integers(1, 4), forward_only=st.booleans())
def test_simulated_as_if_they_stood_where_they_are_opened(
    plan: Plan, ahead: int, forward_only: bool
) -> None:
    memory = FakeMemory(boundary=7)
    comm = FakeComm(bytes_per_s=30.0, latency_s=0.1)
    lists = lower_plan(plan, forward_only=forward_only)
    early = ActionLists(ranks=tuple(moved(actions, ahead) for actions in lists.ranks))
    options = {"memory": memory, "comm": comm, "forward_only": forward_only}
    opened = run(plan, framework=Framework(receives_ahead=ahead), **options)
    stood = run(plan, lists=early, framework=Framework(receives_ahead=0), **options)
    assert opened.iteration_s == stood.iteration_s
    for rank in range(plan.world_size):
        assert opened.usage[rank] == stood.usage[rank]
        assert opened.memory_over_time(rank) == stood.memory_over_time(rank)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(plan=any_plan, ahead=st.integers(0, 4))
def test_opened_in_order_and_never_late(plan: Plan, ahead: int) -> None:
    for actions in lower_plan(plan).ranks:
        posted_at = receives_posted_at(actions, ahead=ahead)
        assert list(posted_at) == [at for at, a in enumerate(actions) if a.kind in RECEIVES]
        assert all(post_position <= place for place, post_position in posted_at.items())
        assert all(one <= next_ for one, next_ in pairwise(posted_at.values()))


def test_a_message_hides_behind_what_is_computed_meanwhile() -> None:
    """Three stages whose messages take as long as two forwards: two computations are needed."""
    plan = even_plan(3, 1, 8)
    memory, comm = FakeMemory(boundary=1), FakeComm(bytes_per_s=0.5)
    times = [
        run(plan, memory=memory, comm=comm, framework=Framework(receives_ahead=ahead)).iteration_s
        for ahead in (0, 1, 2, 3)
    ]
    assert times[0] > times[1] > times[2] == times[3]


# Sends.


def test_before_the_computation_that_has_so_many_between():
    words = (
        "0F0 0SEND_F0>1[0:1] 0F1 0SEND_F1>1[1:2] 0SEND_F1>2[2:3] 0F2 0B0 SCALE 0B1 NORM 0UNSHARD"
    )
    (actions,) = parse_action_lists(f"rank 0: {words}").ranks
    assert sends_waited_at(actions, behind=1) == {1: 5, 3: 6, 4: 6}
    assert sends_waited_at(actions, behind=2) == {1: 6, 3: 8, 4: 8}
    assert sends_waited_at(actions, behind=0) == {1: 2, 3: 5, 4: 5}
    assert sends_waited_at(actions, behind=9) == {1: 9, 3: 9, 4: 9}, "at NORM"
    assert sends_waited_at(actions[:7], behind=9) == {1: 7, 3: 7, 4: 7}, "at the end"


@settings(deadline=None, max_examples=examples(20))
@given(plan=any_plan, behind=st.integers(0, 9), forward_only=st.booleans())
def test_closed_in_order_after_their_place(plan: Plan, behind: int, forward_only: bool) -> None:
    for actions in lower_plan(plan, forward_only=forward_only).ranks:
        waited_at = sends_waited_at(actions, behind=behind)
        assert list(waited_at) == [at for at, a in enumerate(actions) if a.kind in SENDS]
        assert all(place < closing for place, closing in waited_at.items())
        assert all(one <= next_ for one, next_ in pairwise(waited_at.values()))
        ends = {closing for closing in waited_at.values() if closing < len(actions)}
        assert all(actions[at].kind in COMPUTE | {Kind.NORM} for at in ends)


@pytest.mark.parametrize("behind", [0, 1, 2, 8])
def test_the_main_stream_waits_there(behind: int) -> None:
    """Two stages with messages of 10 s and forwards of 1 s: as many of these as may run, do."""
    result = run(
        even_plan(2, 1, 12),
        memory=FakeMemory(boundary=10),
        comm=FakeComm(bytes_per_s=1.0),
        forward_only=True,
        framework=Framework(sends_behind=behind),
    )
    starts_s = [span.end_s - 1.0 for span in result.spans(0) if span.action.startswith("0F")]
    assert starts_s[: behind + 2] == [*map(float, range(behind + 1)), 11.0]


# Known durations.

pipelined_plans = st.one_of(plans(), lowerable_plans(schedule_names=("interleaved",)))


def with_transfers(plan: Plan, transfer: TransferTime | None) -> Plan:
    """The plan with this transfer between all chunks of different groups."""
    follows = [*(chunk.group for chunk in plan.chunks[1:]), None]
    chunks = tuple(
        dataclasses.replace(chunk, transfer=None if after in (None, chunk.group) else transfer)
        for chunk, after in zip(plan.chunks, follows, strict=True)
    )
    return dataclasses.replace(plan, chunks=chunks)


def events_of(plan: Plan, *, forward_only: bool = False):
    return list(
        Pipeline(plan, Boundaries(plan), policy_of(plan), forward_only=forward_only).simulate()
    )


NUM = 20
NS = 10**9


def two_groups(transfer: TransferTime | None) -> Plan:
    """Forwards of 1, backwards of 2; so much in flight that only the transfer makes anyone wait."""
    plan = even_plan(2, 1, NUM)
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                replace(each, compute_s=((1.0, 2.0, 0.0),), max_in_flight=most)
                for each in group.replicas
            ),
        )
        for group, most in zip(plan.groups, (7, 2), strict=True)
    )
    return with_transfers(replace(plan, groups=groups), transfer)


@pytest.mark.parametrize("latency_s", [0.0, 2.0, 3.5])
def test_the_schedule_takes_as_long_as_the_transfer_asks_for(latency_s):
    """The first forward, its way, all of the last group's work, the last gradient's way."""
    transfer = TransferTime(latency_s=latency_s, s_per_sample=1.0)
    end = max(event.end for event in events_of(two_groups(transfer)))
    ideal_s = 1 + (latency_s + 1) + 3 * NUM + (latency_s + 1) + 2
    assert end / NS == pytest.approx(ideal_s)


def test_an_order_that_knows_the_transfer_is_ideal_and_one_that_does_not_is_longer():
    slow = {"memory": FakeMemory(boundary=3), "comm": FakeComm(bytes_per_s=1.0)}
    known = run(two_groups(TransferTime(latency_s=3.0, s_per_sample=0.0)), **slow)
    unknown = run(even_plan(2, 1, NUM), **slow)
    assert known.iteration_s == pytest.approx(3 * NUM + 9)
    assert unknown.iteration_s > known.iteration_s + 3


@pytest.mark.slow
@settings(deadline=None)
@given(plan=pipelined_plans, forward_only=st.booleans())
def test_nothing_starts_before_its_inputs_have_arrived(plan, forward_only):
    """Arrivals are found again from the events alone, transfer by transfer."""
    boundaries = Boundaries(plan)
    has_times = plan.groups[0].replicas[0].compute_s is not None
    events = [e for e in events_of(plan, forward_only=forward_only) if e.kind in COMPUTE]
    starts = {(e.chunk, e.forward, e.micro_batch.key): e.time for e in events}
    assert len(starts) == len(events)
    for event in events:
        lower = event.chunk if event.forward else event.chunk - 1
        if not 0 <= lower < len(plan.chunks) - 1:
            continue
        link = boundaries.after_chunk[lower]
        pieces = (link.by_source if event.forward else link.by_target)[event.micro_batch.key]
        transfer = plan.chunks[lower].transfer if has_times else None
        for piece in pieces:
            way_s = 0.0
            if transfer is not None:
                way_s = transfer.latency_s + (piece.stop - piece.start) * transfer.s_per_sample
            chunk, micro_batch = (
                (lower + 1, piece.target) if event.forward else (lower, piece.source)
            )
            arrival = event.end + NS * way_s
            assert starts[chunk, event.forward, micro_batch.key] >= arrival - 1


@pytest.mark.slow
@settings(deadline=None)
@given(plan=pipelined_plans, forward_only=st.booleans())
def test_transfers_that_take_no_time_change_no_order(plan, forward_only):
    none, no_time = (
        with_transfers(plan, None),
        with_transfers(plan, TransferTime(latency_s=0.0, s_per_sample=0.0)),
    )
    options = {"forward_only": forward_only}
    assert lower_plan(no_time, **options) == lower_plan(none, **options)


@pytest.mark.slow
@settings(deadline=None)
@given(plan=lowerable_plans(schedule_names=("breadth_first",)))
def test_breadth_first_ignores_transfers(plan):
    assert lower_plan(plan) == lower_plan(with_transfers(plan, None))


# Megatron's own.

PLAN = dealt_out(even_plan(2, 1, 4), 2, schedule="interleaved")
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
        kind = "F" if action.kind is Kind.RECV_F else "B"
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
        "R1F0 1F0 1SEND_F0 R1F1 1F1 1SEND_F1 R1F2 1F2 1SEND_F2 R1B0 1B0 1SEND_B0 R1F3 1F3 "
        "1SEND_F3 R1B1 1B1 1SEND_B1 "
        "R1B2 1B2 1SEND_B2 R1B3 1B3 1SEND_B3"
    )


def test_a_gradient_has_left_when_the_next_one_was_sent():
    actions = with_receives_posted(passes_of(1))
    waited_at = {
        str(actions[s]): str(actions[at]) for s, at in gradients_waited_at(actions).items()
    }
    found = {send.split(">")[0]: closed for send, closed in waited_at.items()}
    assert found == {
        **{"3SEND_B0": "1F2", "3SEND_B1": "1F3", "1SEND_B0": "3F2", "1SEND_B1": "3F3"},
        **{"3SEND_B2": "1B2", "3SEND_B3": "1B3", "1SEND_B2": "NORM", "1SEND_B3": "NORM"},
    }


def test_what_has_no_backward_stays():
    lists = lower_plan(PLAN, forward_only=True)
    assert with_receives_posted(lists.ranks[1]) == tuple(lists.ranks[1])
    assert with_receives_at_last(lists.ranks[1]) == tuple(lists.ranks[1])
