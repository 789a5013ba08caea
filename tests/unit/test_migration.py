"""Who sends what when state moves to another plan, against numbers that are moved one by one."""

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from zorse_megatron.live.move import (
    MoveError,
    Owners,
    Transfer,
    elements,
    peak_bytes,
    plan_transfers,
    received_bytes,
    sent_bytes,
)
from zorse_megatron.schedule.tensor_parallel_parts import (
    TensorBlock,
    equal_part,
    interval_blocks,
    owned_blocks,
)

RANKS = 5
STATE_BYTES = (4, 4, 2)
Shapes = dict[str, tuple[int, ...]]
Places = dict[int, set[tuple[str, int]]]
"""Rank -> elements that it owns: parameter and place."""


@st.composite
def owners_under_a_plan(draw: DrawFn, shapes: Shapes) -> dict[int, dict[str, list[TensorBlock]]]:
    """Groups of ranks, each with some of the parameters, in sets or in shards; perhaps two copies.

    A parameter with two copies is a tied embedding.
    """
    ranks = draw(st.permutations(range(RANKS)))
    cut = draw(st.integers(1, RANKS - 1))
    groups = draw(st.sampled_from([[ranks], [ranks[:cut], ranks[cut:]]]))
    owners: dict[int, dict[str, list[TensorBlock]]] = {rank: {} for rank in ranks}
    for name, shape in shapes.items():
        holding = groups if name == "tied" else [draw(st.sampled_from(groups))]
        for group in holding:
            for rank, block in draw(dealt(shape, group)):
                owners[rank].setdefault(name, []).append(block)
    return owners


@st.composite
def dealt(draw: DrawFn, shape: tuple[int, ...], group: list[int]) -> list[tuple[int, TensorBlock]]:
    """A tensor dealt out to one set of all ranks, or to replicas of one rank by weight."""
    if draw(st.booleans()):
        axis = draw(st.sampled_from([None, *range(len(shape))]))
        parts = {
            rank: equal_part(shape, axis, index=index, degree=len(group))
            for index, rank in enumerate(group)
        }
        replicas, weights = [parts], [1.0]
    else:
        replicas = [{rank: equal_part(shape, None, index=0, degree=1)} for rank in group]
        weight = st.sampled_from([0.0, 1.0, 2.5])
        weights = draw(st.lists(weight, min_size=len(group), max_size=len(group)).filter(any))
    return [(each.owner, each.block) for each in owned_blocks(replicas, weights)]


@st.composite
def two_plans(draw: DrawFn) -> tuple[Shapes, Owners, Owners]:
    side = st.integers(1, 9)
    shapes = {
        name: tuple(draw(st.lists(side, min_size=1, max_size=3))) for name in ("b", "a", "tied")
    }
    return shapes, draw(owners_under_a_plan(shapes)), draw(owners_under_a_plan(shapes))


def numbers(shape: tuple[int, ...], block: TensorBlock) -> list[int]:
    """Places in the flattened tensor, from the coordinates of each element."""
    sides = (slice(o, o + n) for o, n in zip(block.offset, block.size, strict=True))
    found: list[int] = np.arange(prod(shape)).reshape(shape)[tuple(sides)].ravel().tolist()
    return found


def places(shapes: Shapes, owners: Owners) -> Places:
    return {
        rank: {
            (name, at)
            for name, blocks in owned.items()
            for block in blocks
            for at in numbers(shapes[name], block)
        }
        for rank, owned in owners.items()
    }


@given(two_plans())
def test_every_element_gets_to_its_owner_once(plans: tuple[Shapes, Owners, Owners]) -> None:
    shapes, before, after = plans
    had, wanted = places(shapes, before), places(shapes, after)
    got: Counter[tuple[int, str, int]] = Counter()
    for each in plan_transfers(before, after):
        for at in numbers(shapes[each.parameter], each.block):
            assert (each.parameter, at) in had[each.source]
            got[each.destination, each.parameter, at] += 1
    assert got == Counter((rank, *place) for rank, owned in wanted.items() for place in owned)


@given(two_plans())
def test_bytes_are_those_of_what_owners_lack(plans: tuple[Shapes, Owners, Owners]) -> None:
    shapes, before, after = plans
    had, wanted = places(shapes, before), places(shapes, after)
    transfers = plan_transfers(before, after)
    each_b = sum(STATE_BYTES)
    lacking = {rank: each_b * len(wanted[rank] - had[rank]) for rank in wanted}
    assert received_bytes(transfers, STATE_BYTES) == Counter(
        {rank: count for rank, count in lacking.items() if count}
    )
    assert sent_bytes(transfers, STATE_BYTES).total() == sum(lacking.values())
    for rank, owned in before.items():
        assert elements(owned) == len(had[rank])


@given(two_plans())
def test_the_peak_is_that_of_an_account_of_buffers(plans: tuple[Shapes, Owners, Owners]) -> None:
    """Allocate and free in the order of a move, one state of one parameter after the other."""
    shapes, before, after = plans
    had = places(shapes, before)
    transfers = plan_transfers(before, after)
    for rank in range(RANKS):
        held = highest = sum(STATE_BYTES) * len(had[rank])
        for name in sorted(shapes):
            aside = sum(place[0] == name for place in had[rank])
            messages = [t for t in transfers if t.is_sent and t.parameter == name]
            passing = sum(t.block.numel for t in messages if rank in (t.source, t.destination))
            for itemsize in STATE_BYTES:
                held += itemsize * passing
                highest = max(highest, held)
                held -= itemsize * passing
            held -= sum(STATE_BYTES) * aside
        assert held == 0
        assert peak_bytes(rank, before[rank], transfers, STATE_BYTES) == highest


@given(two_plans())
def test_an_element_without_an_owner_is_refused(plans: tuple[Shapes, Owners, Owners]) -> None:
    _, before, after = plans
    poorer = {rank: {n: b for n, b in owned.items() if n != "a"} for rank, owned in before.items()}
    with pytest.raises(MoveError, match="parameter a"):
        plan_transfers(poorer, after)


def test_what_a_rank_owns_already_is_not_sent() -> None:
    """Of two copies of the same rows, the one on the rank itself; else the lowest rank's."""
    rows = TensorBlock(offset=(0, 0), size=(4, 3))
    lower, upper = (TensorBlock(offset=(at, 0), size=(2, 3)) for at in (0, 2))
    before = {0: {"w": [rows]}, 1: {"w": [lower]}, 2: {"w": [upper]}}
    after = {1: {"w": [rows]}, 2: {"w": [upper]}}
    assert plan_transfers(before, after) == (
        Transfer(parameter="w", block=lower, source=1, destination=1),
        Transfer(parameter="w", block=upper, source=0, destination=1),
        Transfer(parameter="w", block=upper, source=2, destination=2),
    )


def test_a_change_of_weights_moves_the_difference() -> None:
    """From 3:1 to 1:1 of 4,096 elements, a quarter goes from the first rank to the second."""
    shape = (4096,)
    before, after = (
        {rank: {"w": list(interval_blocks(shape, span))} for rank, span in enumerate(spans)}
        for spans in (((0, 3072), (3072, 4096)), ((0, 2048), (2048, 4096)))
    )
    (sent,) = [each for each in plan_transfers(before, after) if each.is_sent]
    assert (sent.source, sent.destination, sent.block.numel) == (0, 1, prod(shape) // 4)
