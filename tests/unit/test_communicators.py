"""Which communicators a plan needs, and that all their kernels fit onto each GPU at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.made_plans import even_plan, plan_of, replica
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule import communicators
from zorse_megatron.schedule.actions import SENDS
from zorse_megatron.schedule.communicators import (
    WORLD_CTAS,
    Communicator,
    communicators_of,
    deadlock_note,
    max_ctas,
    planned_communicators,
    ranks_at_risk,
    resident_kernels,
    threads_note,
)
from zorse_megatron.schedule.lower import lower_plan

any_plan = st.one_of(plans(), lowerable_plans())


def test_a_link_for_each_direction_a_group_and_the_world():
    found = communicators_of(even_plan(2, 2, 4), [lower_plan(even_plan(2, 2, 4))])
    by_use = {use: [c.ranks for c in found if c.use == use] for use in ("world", "group", "link")}
    assert by_use["world"] == [(0, 1, 2, 3)]
    assert by_use["group"] == [(0, 1), (2, 3)]
    assert by_use["link"] == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert resident_kernels(found) == dict.fromkeys(range(4), 4)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(40))
@given(plan=any_plan)
def test_every_message_has_one_and_nobody_has_one_alone(plan):
    lists = lower_plan(plan)
    found = communicators_of(plan, [lists])
    assert len(set(found)) == len(found)
    assert all(len(c.ranks) > 1 for c in found)
    links = {c.ranks for c in found if c.use == "link"}
    sent = {(r, a.peer) for r, each in enumerate(lists.ranks) for a in each if a.kind in SENDS}
    assert links == sent


@given(
    edges=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda e: e[0] != e[1]),
        min_size=1,
        unique=True,
    ),
    num_sms=st.lists(st.sampled_from([40, 46, 80, 108, 132]), min_size=6, max_size=6),
)
def test_all_kernels_fit_beside_the_computations(edges, num_sms):
    links = [Communicator(use="link", ranks=edge) for edge in edges]
    if max(resident_kernels(links).values()) > min(num_sms) // 4:
        return
    ctas = max_ctas(links, num_sms)
    for rank, room in enumerate(num_sms):
        # NCCL rounds the channels of messages up to a power of two.
        held = sum(1 << (count - 1).bit_length() for c, count in ctas.items() if rank in c.ranks)
        assert held <= room / 4
    assert min(ctas.values()) >= 1
    assert max_ctas(links[::-1], num_sms) == ctas


def one_to_many(num_peers: int, size: int) -> Plan:
    """A rank whose micro-batches of `size` samples go to the peers in turn, one sample to each."""
    here = replica(0, size=size, count=4 * num_peers // size)
    return plan_of([here], [replica(1 + n, count=4) for n in range(num_peers)])


def test_only_kernels_that_can_wait_at_once_crowd_a_gpu():
    """The same 33 communicators: micro-batch after micro-batch fewer wait than all at once."""
    one_by_one, together = one_to_many(16, 1), one_to_many(16, 16)
    few, enough = [24, *[100] * 16], [60, *[100] * 16]
    for plan in (one_by_one, together):
        assert resident_kernels(planned_communicators(plan))[0] == 33
        assert ranks_at_risk(plan, enough) == {}
        assert deadlock_note(plan, enough) is None
    assert ranks_at_risk(one_by_one, few) == {}
    (held,) = ranks_at_risk(together, few).values()
    assert held == 16 + 16 + WORLD_CTAS
    note = deadlock_note(together, few)
    assert note is not None and "1 of 17 ranks" in note
    assert f"rank 0, where they hold up to {held} multiprocessors of 24" in note


@pytest.mark.parametrize("size", [1, 4, 16])
def test_threads_of_connections_that_wait_at_once_crowd_a_node(size):
    plan = one_to_many(16, size)
    actions = lower_plan(plan).ranks[0]
    spans = list(communicators.message_spans(0, actions))
    waiting = max(
        len({span.link for span in spans if span.first <= at <= span.last})
        for at in range(len(actions))
    )
    nodes = ["one", *["many"] * 16]
    plenty = {"many": 1000}
    assert threads_note(plan, nodes, {"one": waiting + 1} | plenty) is None  # and the world's
    note = threads_note(plan, nodes, {"one": waiting} | plenty)
    assert note is not None and f"{waiting + 1} threads of node one" in note
    # Within a node there are none.
    assert threads_note(plan, ["one"] * 17, {"one": 1}) is None


def test_of_very_large_plans_all_communicators_are_taken_for_waiting(monkeypatch):
    monkeypatch.setattr(communicators, "_MOST_RANKS_COUNTED", 16)
    monkeypatch.setattr(communicators, "lower_plan", None)
    assert ranks_at_risk(one_to_many(16, 1), [24, *[100] * 16]) == {0: 32 + WORLD_CTAS}
