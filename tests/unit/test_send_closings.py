"""Until when a message may be on its way: a function of the list, which never blocks for ever."""

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
from zorse_megatron.schedule.actions import COMPUTE, SENDS, Kind, parse_action_lists
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.transfer_windows import send_closings
from zorse_megatron.simulate.assumptions import Framework

any_plan = st.one_of(plans(), lowerable_plans())


def test_before_the_computation_that_has_so_many_between():
    words = "0F0 0SA0>1[0:1] 0F1 0SA1>1[1:2] 0SA1>2[2:3] 0F2 0B0 SCALE 0B1 NORM 0GATHER"
    (actions,) = parse_action_lists(f"rank 0: {words}").ranks
    assert send_closings(actions, behind=1) == {1: 5, 3: 6, 4: 6}
    assert send_closings(actions, behind=2) == {1: 6, 3: 8, 4: 8}
    assert send_closings(actions, behind=0) == {1: 2, 3: 5, 4: 5}
    assert send_closings(actions, behind=9) == {1: 9, 3: 9, 4: 9}, "at NORM"
    assert send_closings(actions[:7], behind=9) == {1: 7, 3: 7, 4: 7}, "at the end"


@settings(deadline=None, max_examples=examples(20))
@given(plan=any_plan, behind=st.integers(0, 9), forward_only=st.booleans())
def test_closed_in_order_after_their_place(plan: Plan, behind: int, forward_only: bool) -> None:
    for actions in lower_plan(plan, forward_only=forward_only).ranks:
        closings = send_closings(actions, behind=behind)
        assert list(closings) == [at for at, a in enumerate(actions) if a.kind in SENDS]
        assert all(place < closing for place, closing in closings.items())
        assert all(one <= next_ for one, next_ in pairwise(closings.values()))
        ends = {closing for closing in closings.values() if closing < len(actions)}
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
