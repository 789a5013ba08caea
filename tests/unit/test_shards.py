"""Who holds and owns what: of flat buffers, tensors, sets, and regions."""

import itertools
import math
from collections import Counter
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from tests.equal_parts import equal_part
from zorse_megatron.schedule.shards import (
    RegionShards,
    intersection,
    regions_of,
    shard_bounds,
)
from zorse_megatron.schedule.tensor_parallel_parts import (
    OwnedBlock,
    TensorBlock,
    TensorPart,
    interval_blocks,
    owned_blocks,
    runs_of,
    runs_of_rows,
)

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
    overlaps = (intersection(*pair) for pair in itertools.product(mine, theirs))
    for start, stop in filter(None, overlaps):
        assert start == position
        position = stop
    assert position == total


# Regions.

SIZES = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@st.composite
def region_shards(draw: st.DrawFn) -> RegionShards:
    sizes = draw(SIZES)
    stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    weights = draw(st.lists(st.integers(0, 4), min_size=stops[-1], max_size=stops[-1]).filter(any))
    total = draw(st.integers(0, 3000))
    return RegionShards(
        bounds=shard_bounds(total, weights, align=draw(st.sampled_from([1, 64]))),
        regions=tuple(pairwise([0, *stops])),
    )


@given(region_shards())
def test_every_element_is_summed_once_in_each_region_and_sent_to_its_owner_once(
    shards: RegionShards,
) -> None:
    total = shards.bounds[-1][1]
    for region in range(len(shards.regions)):
        summed: Counter[int] = Counter()
        for block in range(len(shards.regions)):
            for start, stop in shards.slices(region, block):
                summed.update(range(start, stop))
        assert summed == Counter(range(total))
    arrived: dict[int, Counter[int]] = {rank: Counter() for rank in range(len(shards.bounds))}
    for each in shards.crossings:
        region, block = map(shards.region_of, (each.delegate, each.owner))
        place = each.delegate - shards.regions[region][0]
        start, stop = shards.slices(region, block)[place]
        assert start <= each.start < each.stop <= stop
        arrived[each.owner].update(range(each.start, each.stop))
    others = len(shards.regions) - 1
    for (start, stop), found in zip(shards.bounds, arrived.values(), strict=True):
        assert found == Counter(dict.fromkeys(range(start, stop), others))


@given(region_shards())
def test_the_least_crosses_between_regions_evenly_spread(shards: RegionShards) -> None:
    """An element's sum must come from each region without its owner: that is the least."""
    owner_of = [
        rank for rank, (start, stop) in enumerate(shards.bounds) for _ in range(start, stop)
    ]
    least = sum(
        region != shards.region_of(owner)
        for owner in owner_of
        for region in range(len(shards.regions))
    )
    assert sum(each.count for each in shards.crossings) == least
    ranks = range(len(shards.bounds))
    for first, stop in shards.regions:
        sent = [sum(shards.sent_as_delegate(rank)) for rank in range(first, stop)]
        # A block is cut evenly, or in units of 64 elements.
        assert max(sent) - min(sent) <= 2 * 64 * (len(shards.regions) - 1)
    for rank in ranks:
        start, stop = shards.bounds[rank]
        assert sum(shards.sent_as_owner(rank)) == (len(shards.regions) - 1) * (stop - start)
        assert shards.sent_as_delegate(rank)[rank] == 0
    for (source, target), count in shards.messages(to_owners=True).items():
        assert shards.sent_as_delegate(source)[target] == count
        assert shards.sent_as_owner(target)[source] == count
        assert shards.messages(to_owners=False)[target, source] == count


@pytest.mark.parametrize("regions", [((0, 1),), ((0, 2), (1, 3)), ((0, 0), (0, 3)), ()])
def test_regions_that_are_not_all_ranks_are_refused(regions: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="expected intervals"):
        RegionShards(bounds=((0, 1), (1, 2), (2, 3)), regions=regions)


def test_regions_of_runs_of_ranks() -> None:
    assert regions_of(((3, 9), (10,), (11, 12, 13))) == ((0, 2), (2, 3), (3, 6))


# Blocks.

SHAPES = st.lists(st.integers(min_value=1, max_value=5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_boxes_hold_the_interval_in_flat_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = np.arange(numel).reshape(shape)
    boxes = interval_blocks(shape, (start, stop))
    elements: list[int] = []
    for box in boxes:
        block = tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]
        assert block.shape == box.size
        assert box.numel == block.size > 0
        elements += block.ravel().tolist()
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert len({box.offset for box in boxes}) == len(boxes)


def test_intervals_outside_the_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="inside a tensor"):
        interval_blocks((2, 3), (0, 7))


# Parts of tensors.


@st.composite
def replicas_of_a_tensor(
    draw: DrawFn,
) -> tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]]:
    """A shape, what each rank of each replica holds, and weights."""
    axis = draw(st.sampled_from([None, 0, 1]))
    counts = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    blocks = draw(st.sampled_from([1, 2]))
    shape = [draw(st.integers(1, 9)), draw(st.integers(1, 9))]
    if axis is not None:
        shape[axis] = 12 * blocks
    replicas, rank = [], 0
    for degree in counts:
        replicas.append(
            {
                rank + index: equal_part(shape, axis, index=index, degree=degree, blocks=blocks)
                for index in range(degree)
            }
        )
        rank += degree
    weights = draw(
        st.lists(
            st.sampled_from([0.0, 1.0, 2.5]), min_size=len(counts), max_size=len(counts)
        ).filter(any)
    )
    return tuple(shape), replicas, weights


def held(part: TensorPart) -> np.ndarray:
    """The numbers of the whole tensor's elements that a rank holds, in its own shape."""
    whole = np.arange(prod(part.shape)).reshape(part.shape)
    if part.axis is None:
        return whole
    pieces = [np.take(whole, range(a, b), axis=part.axis) for a, b in part.pieces]
    return np.concatenate(pieces, axis=part.axis)


def elements(shape: tuple[int, ...], block: TensorBlock) -> list[int]:
    whole = np.arange(prod(shape)).reshape(shape)
    spans = zip(block.offset, block.size, strict=True)
    return list(whole[tuple(slice(a, a + n) for a, n in spans)].flat)


@given(case=replicas_of_a_tensor())
def test_each_element_has_one_owner_that_holds_it(
    case: tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]],
) -> None:
    shape, replicas, weights = case
    owners: Counter[int] = Counter()
    for each in owned_blocks(replicas, weights):
        inside = elements(shape, each.block)
        owners.update(inside)
        (mine,) = [n for n, replica in enumerate(replicas) if each.owner in replica]
        assert weights[mine] > 0
        # One of each replica adds to the sum, and all that have it are told the result.
        having = [
            {r for r, part in replica.items() if set(inside) <= set(held(part).flat)}
            for replica in replicas
        ]
        assert [rank in ranks for rank, ranks in zip(each.contributors, having, strict=True)]
        assert all(r in h for r, h in zip(each.contributors, having, strict=True))
        assert sorted(each.holders) == sorted(rank for ranks in having for rank in ranks)
        assert each.owner in each.contributors
    assert owners == Counter(range(prod(shape)))


@given(case=replicas_of_a_tensor())
def test_a_block_is_where_the_rank_has_it(
    case: tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]],
) -> None:
    shape, replicas, weights = case
    parts = {rank: part for replica in replicas for rank, part in replica.items()}
    for each in owned_blocks(replicas, weights):
        for rank in each.holders:
            local = parts[rank].local(each.block)
            mine = held(parts[rank])
            assert mine.shape == parts[rank].local_shape
            spans = zip(local.offset, local.size, strict=True)
            found = mine[tuple(slice(a, a + n) for a, n in spans)]
            assert list(found.flat) == elements(shape, each.block)


@given(case=replicas_of_a_tensor())
def test_shares_follow_the_weights(
    case: tuple[tuple[int, ...], list[dict[int, TensorPart]], list[float]],
) -> None:
    shape, replicas, weights = case
    blocks = owned_blocks(replicas, weights)
    owned = [
        sum(each.block.numel for each in blocks if each.owner in replica) for replica in replicas
    ]
    cells = len({each.contributors for each in blocks}) + 2 * len(blocks)
    for count, weight in zip(owned, weights, strict=True):
        # Each cell is cut in units of 64 elements.
        assert abs(count - prod(shape) * weight / sum(weights)) <= 128 * cells


def test_a_block_as_runs() -> None:
    shape = (3, 4, 5)
    for block in (
        TensorBlock(offset=(0, 1, 2), size=(3, 2, 2)),
        TensorBlock(offset=(1, 0, 0), size=(2, 4, 5)),
        TensorBlock(offset=(0, 2, 0), size=(2, 2, 5)),
    ):
        runs = list(runs_of(block, shape, 7))
        assert [e for run in runs for e in range(run.start, run.stop)] == elements(shape, block)
        assert runs[0].at == 7
        assert all(a.at + a.stop - a.start == b.at for a, b in pairwise(runs))


def test_rows_of_two_pieces_as_runs() -> None:
    part = TensorPart(shape=(8, 3), axis=0, pieces=((1, 3), (5, 7)))
    mine = held(part).reshape(-1)
    for start in range(12):
        for stop in range(start, 13):
            found = [
                (e, run.at + e - run.start)
                for run in runs_of_rows(part, (start, stop))
                for e in range(run.start, run.stop)
            ]
            assert found == [(int(mine[at]), at) for at in range(start, stop)]


def test_what_a_tp_group_holds_whole_is_owned_by_its_first_rank() -> None:
    replicas = [{rank: equal_part((100,), None, index=i, degree=2)} for i, rank in enumerate((4,))]
    replicas.append(
        {rank: equal_part((100,), None, index=i, degree=2) for i, rank in ((0, 7), (1, 8))}
    )
    owners = {each.owner for each in owned_blocks(replicas, (1.0, 1.0))}
    assert owners == {4, 7}


def test_columns_of_one_rank_are_strided() -> None:
    """A replica of one rank owns, of each half of the columns, what it owns of it."""
    halves = {r: equal_part((4, 64), 1, index=r, degree=2) for r in (0, 1)}
    whole = {2: equal_part((4, 64), 1, index=0, degree=1)}
    blocks: tuple[OwnedBlock, ...] = owned_blocks([halves, whole], (0.0, 1.0))
    assert [(b.block.offset, b.block.size, b.owner) for b in blocks] == [
        ((0, 0), (4, 32), 2),
        ((0, 32), (4, 32), 2),
    ]
    assert [b.contributors for b in blocks] == [(0, 2), (1, 2)]
