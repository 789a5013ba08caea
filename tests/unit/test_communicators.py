"""Which communicators a plan needs, and that all their kernels fit onto each GPU at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import lowerable_plans, plans
from tests.unit.test_schedules import even_plan
from zorse_megatron.schedules.actions import SENDS
from zorse_megatron.schedules.communicators import (
    Communicator,
    communicators_of,
    crowded_ranks,
    crowding_note,
    max_ctas,
    resident_kernels,
)
from zorse_megatron.schedules.lower import lower_plan

any_plan = st.one_of(plans(), lowerable_plans())


def test_a_link_for_each_direction_a_group_and_the_world():
    found = communicators_of(even_plan(2, 2, 4), [lower_plan(even_plan(2, 2, 4))])
    by_use = {use: [c.ranks for c in found if c.use == use] for use in ("world", "group", "link")}
    assert by_use["world"] == [(0, 1, 2, 3)]
    assert by_use["group"] == [(0, 1), (2, 3)]
    assert by_use["link"] == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert resident_kernels(found) == dict.fromkeys(range(4), 4)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
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
    communicators = [Communicator(use="link", ranks=edge) for edge in edges]
    if max(resident_kernels(communicators).values()) > min(num_sms) // 2:
        return
    ctas = max_ctas(communicators, num_sms)
    for rank, room in enumerate(num_sms):
        held = sum(count for c, count in ctas.items() if rank in c.ranks)
        assert held <= room / 2
    assert min(ctas.values()) >= 1
    assert max_ctas(communicators[::-1], num_sms) == ctas


def test_kernels_that_may_fill_a_gpu_are_told():
    links = [
        Communicator(use="link", ranks=(rank, peer)) for rank in (0, 1) for peer in range(2, 8)
    ]
    few = [10, 8, *[100] * 6]
    assert crowded_ranks(links, few) == {0: 6, 1: 6}
    note = crowding_note(links, few)
    assert note is not None and note.startswith("2 of 8 ranks") and "rank 1: 6 on 8." in note
    assert set(max_ctas(links, few).values()) == {1}
    enough = [12, 160, *[100] * 6]
    assert crowding_note(links, enough) is None
    shares = max_ctas(links, enough)
    assert set(shares.values()) == {1, 6}
    assert len(shares) == 12
