"""Shards of a flat buffer: cover, proportion, alignment, zero weights, stock's equal split."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.schedule.shards import intersection, overlaps, shard_bounds

WEIGHTS = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=9).filter(any)
TOTALS = st.integers(min_value=0, max_value=100_000)


@given(total=TOTALS, weights=WEIGHTS, align=st.sampled_from([1, 3, 64]))
def test_shards_cover_the_buffer_in_order(total: int, weights: list[float], align: int) -> None:
    bounds = shard_bounds(total, weights, align=align)
    assert len(bounds) == len(weights)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)


@given(total=TOTALS, weights=WEIGHTS)
def test_shards_are_proportional_aligned_and_empty_for_weight_zero(
    total: int, weights: list[float]
) -> None:
    bounds = shard_bounds(total, weights)
    equal = len({weight for weight in weights if weight}) == 1
    for (start, stop), weight in zip(bounds, weights, strict=True):
        if weight == 0:
            assert start == stop
        assert abs(stop - start - weight / sum(weights) * total) <= 2 * 64
        assert equal or start % 64 == 0 or start == total


@given(size=st.integers(min_value=0, max_value=3000), members=st.integers(1, 9))
def test_equal_weights_give_the_stock_split(size: int, members: int) -> None:
    bounds = shard_bounds(size * members, [0.3] * members)
    assert bounds == tuple((m * size, (m + 1) * size) for m in range(members))


def test_equal_positive_weights_beside_zeros_split_evenly() -> None:
    assert shard_bounds(6, (0, 2, 0, 2)) == ((0, 0), (0, 3), (3, 3), (3, 6))


def test_totals_too_small_for_every_member() -> None:
    assert shard_bounds(10, (1, 2, 3)) == ((0, 0), (0, 0), (0, 10))
    assert shard_bounds(0, (1, 2)) == ((0, 0), (0, 0))


def test_ties_go_to_the_earlier_member() -> None:
    assert shard_bounds(3 * 64, (1, 1)) == ((0, 96), (96, 192))  # divides: stock's split
    assert shard_bounds(3 * 64 - 1, (1, 1)) == ((0, 128), (128, 191))


@pytest.mark.parametrize("weights", [(), (0, 0), (-1, 2), (float("nan"), 1), (float("inf"), 1)])
def test_impossible_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shard weights"):
        shard_bounds(10, weights)


@given(total=TOTALS, first=WEIGHTS, second=WEIGHTS)
def test_overlaps_cover_every_element_once(
    total: int, first: list[float], second: list[float]
) -> None:
    mine, theirs = shard_bounds(total, first), shard_bounds(total, second)
    position = 0
    for overlap in overlaps(mine, theirs):
        assert overlap.start == position
        piece = (overlap.start, overlap.stop)
        assert intersection(mine[overlap.first_member], piece) == piece
        assert intersection(theirs[overlap.second_member], piece) == piece
        position = overlap.stop
    assert position == total
