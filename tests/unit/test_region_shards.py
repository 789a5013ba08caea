"""Two-level sums: every element arrives at its owner once from each region, and no more crosses."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.schedule.shards import RegionShards, regions_of, shard_bounds

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
