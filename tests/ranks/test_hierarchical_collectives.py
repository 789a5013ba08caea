"""Two-level sums and gathers over real gloo ranks: exact, repeatable, in any order of waiting."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from zorse_megatron.runtime import hierarchical_collectives
from zorse_megatron.runtime.collectives import start_stages
from zorse_megatron.runtime.hierarchical_collectives import (
    RegionGroups,
    all_gather_hierarchical,
    reduce_scatter_hierarchical,
)
from zorse_megatron.schedule.shards import Interval, RegionShards, shard_bounds

TWO_AND_THREE = ((0, 2), (2, 5))
ONE_AND_TWO = ((0, 1), (1, 3))
THREE_REGIONS = ((0, 2), (2, 3), (3, 5))


def _groups(regions: tuple[Interval, ...]) -> RegionGroups:
    rank, inside = dist.get_rank(), None
    for first, stop in regions:
        made = dist.new_group(list(range(first, stop)))
        if first <= rank < stop and stop - first > 1:
            inside = made
    return RegionGroups(inside=inside, across=dist.new_group(), regions=regions)


def _numbers(total: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that any order of summation gives the same bits in every dtype."""
    return ((torch.arange(total) * (rank + 2)) % 17).to(dtype)


def _reduce_then_gather(regions: tuple[Interval, ...]) -> None:
    groups, rank, size = _groups(regions), dist.get_rank(), dist.get_world_size()
    weights_list = [[1.0] * size, [float(n % 3) for n in range(size)], [0.0] * (size - 1) + [1.0]]
    for weights, total, dtype in itertools.product(
        weights_list, [960, 1001, 5, 0], [torch.float32, torch.bfloat16]
    ):
        bounds = shard_bounds(total, weights, align=16)
        start, stop = bounds[rank]
        shards = RegionShards(bounds=bounds, regions=regions)
        full = _numbers(total, rank, dtype)
        work = reduce_scatter_hierarchical(full, bounds, groups)
        assert work.buffer_bytes == shards.reduction_buffer(rank) * dtype.itemsize
        work.wait()
        assert work.buffer_bytes == 0
        work.wait()  # adds nothing twice
        expected = torch.stack([_numbers(total, r, dtype) for r in range(size)]).sum(0)
        assert torch.equal(full[start:stop], expected[start:stop])

        gathered = torch.full((total,), -1, dtype=dtype)
        gathered[start:stop] = full[start:stop]
        work = all_gather_hierarchical(gathered, bounds, groups)
        assert work.buffer_bytes == shards.gather_buffer(rank) * dtype.itemsize
        work.wait()
        assert torch.equal(gathered, expected)

    if regions == THREE_REGIONS:
        _in_order(groups, rank)
    if regions == TWO_AND_THREE:
        _stages(groups)


def _stages(groups: RegionGroups) -> None:
    """What each stage waits for, which on hosts is everything before it anyway."""
    found: list[tuple[str, int | None]] = []

    def noting(stages: Any, *rest: Any) -> Any:
        found[:] = [(stage.kind, stage.after) for stage in stages]
        return start_stages(stages, *rest)

    bounds = shard_bounds(960, [1.0] * 5, align=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hierarchical_collectives, "start_stages", noting)
        reduce_scatter_hierarchical(torch.ones(960), bounds, groups).wait()
        sums = "reduce_scatter"
        assert found == [(sums, None), ("exchange", 0), (sums, None)]
        all_gather_hierarchical(torch.ones(960), bounds, groups).wait()
        assert found == [("exchange", None), ("all_gather", None), ("all_gather", 0)]


def _in_order(groups: RegionGroups, rank: int) -> None:
    """Sums of regions that are other ones in another order, or if they are rounded on the way."""
    bounds = shard_bounds(960, [1.0] * 5, align=16)
    # In fp32, (1e8 + 1) - 1e8 is 0; in bf16, 256 + 1 is 256.
    for dtype, of_regions, expected in (
        (torch.float32, (1e8, 1.0, -1e8), 0.0),
        (torch.bfloat16, (256.0, 1.0, 1.0), 258.0),
    ):
        first_of = {
            first: value for (first, _), value in zip(THREE_REGIONS, of_regions, strict=True)
        }
        full = torch.full((960,), first_of.get(rank, 0.0), dtype=dtype)
        reduce_scatter_hierarchical(full, bounds, groups).wait()
        assert (full[slice(*bounds[rank])] == expected).all()


@pytest.mark.parametrize("regions", [TWO_AND_THREE, ONE_AND_TWO, THREE_REGIONS])
def test_regions_reduce_and_gather(regions: tuple[Interval, ...]) -> None:
    run_ranks(regions[-1][1], _reduce_then_gather, regions)


def _sums(regions: tuple[Interval, ...]) -> list[float]:
    """Several buffers under way at once, beside gathers, waited for in each rank's own order."""
    groups, rank, size = _groups(regions), dist.get_rank(), dist.get_world_size()
    rounds = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(rank)
        bounds = shard_bounds(999, [float(n % 3) + 1 for n in range(size)], align=8)
        buffers = [torch.randn(999, generator=generator) for _ in range(6)]
        gathered = [torch.full((999,), float(rank)) for _ in range(6)]
        works = []
        for full, other in zip(buffers, gathered, strict=True):
            works.append(reduce_scatter_hierarchical(full, bounds, groups))
            works.append(all_gather_hierarchical(other, bounds, groups))
        dist.barrier()  # of another communicator, while they are under way
        for work in works if rank % 2 else reversed(works):
            work.wait()
        rounds.append(torch.cat([full[slice(*bounds[rank])] for full in buffers]))
        owners = torch.cat([torch.full((b - a,), float(r)) for r, (a, b) in enumerate(bounds)])
        assert all(torch.equal(each, owners) for each in gathered)
    assert torch.equal(*rounds)
    return rounds[0].tolist()


def test_sums_in_flight_repeat_to_the_bit_in_the_order_of_regions() -> None:
    regions = TWO_AND_THREE
    found = run_ranks(5, _sums, regions)
    inputs = []
    for rank in range(5):
        generator = torch.Generator().manual_seed(rank)
        inputs.append([torch.randn(999, generator=generator) for _ in range(6)])
    bounds = shard_bounds(999, [1.0, 2.0, 3.0, 1.0, 2.0], align=8)
    for rank, sums in enumerate(found):
        exact = torch.cat(
            [
                torch.stack([inputs[r][n].double() for r in range(5)]).sum(0)[slice(*bounds[rank])]
                for n in range(6)
            ]
        )
        # Five summands of magnitude one: four additions, each off by half a unit in the last place.
        assert (torch.tensor(sums).double() - exact).abs().max() < 4 * 8 * 2**-24


def _misfit() -> None:
    groups = _groups(((0, 1), (1, 2)))
    with pytest.raises(ValueError, match="one interval per rank"):
        reduce_scatter_hierarchical(torch.zeros(10), ((0, 10),), groups)


def test_bounds_that_do_not_fit_are_refused() -> None:
    run_ranks(2, _misfit)
