"""Where receives may begin: the same as if they stood there in the list."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_schedules import even_plan
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import (
    COMPUTE,
    RECEIVES,
    Action,
    ActionLists,
    parse_action_lists,
)
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.transfer_windows import receive_openings
from zorse_megatron.simulate.assumptions import Framework

any_plan = st.one_of(plans(), lowerable_plans())


def test_two_computations_before_their_place():
    words = "0F0 0F1 0RG0<1[0:1] 0B0 0F2 0RG1<1[1:2] 0RG2<1[2:3] 0B1 0B2"
    (actions,) = parse_action_lists(f"rank 0: {words}").ranks
    assert receive_openings(actions) == {2: 0, 5: 3, 6: 3}
    assert receive_openings(actions, ahead=1) == {2: 1, 5: 4, 6: 4}
    assert receive_openings(actions, ahead=0) == {2: 2, 5: 5, 6: 6}
    assert receive_openings(actions, ahead=9) == {2: 0, 5: 0, 6: 0}


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
        openings = receive_openings(actions, ahead=ahead)
        assert list(openings) == [at for at, a in enumerate(actions) if a.kind in RECEIVES]
        assert all(opening <= place for place, opening in openings.items())
        assert all(one <= next_ for one, next_ in pairwise(openings.values()))


def test_a_message_hides_behind_what_is_computed_meanwhile() -> None:
    """Three stages whose messages take as long as two forwards: two computations are needed."""
    plan = even_plan(3, 1, 8)
    memory, comm = FakeMemory(boundary=1), FakeComm(bytes_per_s=0.5)
    times = [
        run(plan, memory=memory, comm=comm, framework=Framework(receives_ahead=ahead)).iteration_s
        for ahead in (0, 1, 2, 3)
    ]
    assert times[0] > times[1] > times[2] == times[3]
