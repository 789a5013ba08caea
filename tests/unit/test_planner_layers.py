"""The dynamic programming over layers, and the greedy deal, against trying everything."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from zorse_megatron.planner.closed_form import candidate
from zorse_megatron.planner.closed_form import stage_memory as water
from zorse_megatron.planner.closed_form.candidate import balanced_layers
from zorse_megatron.planner.closed_form.estimator import GroupCost, best_layer_assignments
from zorse_megatron.planner.closed_form.stage_memory import water_fill
from zorse_megatron.planner.search import sources as batches

costs = st.builds(
    lambda busy, passage: GroupCost(busy_s=float(busy), fill_drain_s=float(passage)),
    st.integers(1, 20),
    st.integers(0, 9),
)
tables = st.lists(
    st.dictionaries(st.integers(1, 5), costs, min_size=1, max_size=5), min_size=1, max_size=4
)


def value(table, layers):
    chosen = [costs[number] for costs, number in zip(table, layers, strict=True)]
    return max(cost.busy_s for cost in chosen) + sum(cost.fill_drain_s for cost in chosen)


@pytest.mark.slow
@settings(max_examples=examples(200), deadline=None)
@given(tables, st.integers(1, 12))
def test_no_layout_is_better(table, num_layers):
    every = [layers for layers in product(*table) if sum(layers) == num_layers]
    found = best_layer_assignments(table, num_layers, most=3)
    if not every:
        assert found == ()
        return
    assert found[0].value_s == min(value(table, layers) for layers in every)
    for assignment in found:
        assert assignment.layers in every
        assert assignment.value_s == value(table, assignment.layers)
    assert [assignment.value_s for assignment in found] == sorted(
        assignment.value_s for assignment in found
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9), st.data())
def test_no_deal_is_faster(speeds, num_layers, data):
    most = [data.draw(st.integers(1, 9)) for _ in speeds]
    every = [
        layers
        for layers in product(*(range(1, room + 1) for room in most))
        if sum(layers) == num_layers
    ]
    layers, slowest = balanced_layers(num_layers, speeds, most)
    if not every:
        assert slowest == float("inf")
        return
    assert layers in every
    assert slowest == min(
        max(count / speed for count, speed in zip(each, speeds, strict=True)) for each in every
    )


@given(st.lists(st.integers(-3, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_the_largest_share_is_as_small_as_can_be(rooms, total):
    shares = water_fill(total, rooms)
    free = [max(0, room) for room in rooms]
    if total > sum(free):
        assert shares is None
        return
    assert shares is not None
    assert sum(shares) == pytest.approx(total)
    assert all(share <= room + 1e-9 for share, room in zip(shares, free, strict=True))
    # With a lower level than the largest share, the rooms do not hold the total.
    lower = max(shares) - 1e-6
    assert total == 0 or sum(min(room, lower) for room in free) < total


@pytest.mark.parametrize("module", [candidate, batches, water], ids=lambda module: module.__name__)
def test_docstrings(module):
    import doctest

    results = doctest.testmod(module)
    assert results.attempted and not results.failed
