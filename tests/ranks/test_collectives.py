"""Uneven collectives over real gloo ranks: sums, gathers, empty parts, order, exchange."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import run_ranks
from zorse_megatron.runtime.collectives import (
    IntervalExchange,
    all_gather_uneven,
    exchange_intervals,
    reduce_scatter_uneven,
)
from zorse_megatron.schedule.shards import intersection, shard_bounds

WEIGHTS_3 = [(3, 1, 0), (1, 1, 1), (0, 1, 0), (1, 2, 3), (0, 0, 5)]


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _numbers(total: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, so that any order of summation gives the same bits in every dtype."""
    return ((torch.arange(total) * (rank + 2)) % 17).to(dtype)


def _reduce_then_gather(total: int, weights: tuple[float, ...], dtype: torch.dtype) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    bounds = shard_bounds(total, weights, align=16)
    start, stop = bounds[rank]
    full = _numbers(total, rank, dtype)
    reduce_scatter_uneven(full, bounds, _world()).wait()
    expected = torch.stack([_numbers(total, r, dtype) for r in range(size)]).sum(0)
    assert torch.equal(full[start:stop], expected[start:stop])

    gathered = torch.full((total,), -1, dtype=dtype)
    gathered[start:stop] = full[start:stop]
    all_gather_uneven(gathered, bounds, _world()).wait()
    assert torch.equal(gathered, expected)


def _all_cases(weights_list: list[tuple[float, ...]]) -> None:
    for weights, total, dtype in itertools.product(
        weights_list, [1000, 48, 5, 0], [torch.float32, torch.bfloat16]
    ):
        _reduce_then_gather(total, weights, dtype)


def test_three_ranks_reduce_and_gather() -> None:
    run_ranks(3, _all_cases, WEIGHTS_3)


def test_one_rank_is_a_no_op() -> None:
    run_ranks(1, _all_cases, [(1,)])


def _many_in_flight() -> list[float]:
    """Several buffers under way at once, waited for in another order; twice, to compare bits."""
    results = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(dist.get_rank())
        buffers = [torch.randn(999, generator=generator) for _ in range(6)]
        bounds = [shard_bounds(999, weights) for weights in [*WEIGHTS_3, (1, 0, 1)]]
        works = [
            reduce_scatter_uneven(full, cut, _world())
            for full, cut in zip(buffers, bounds, strict=True)
        ]
        for work in reversed(works):
            work.wait()
        own = [
            full[slice(*cut[dist.get_rank()])] for full, cut in zip(buffers, bounds, strict=True)
        ]
        results.append(torch.cat(own))
    assert torch.equal(results[0], results[1])
    return results[0].tolist()


def test_buffers_in_flight_do_not_mix_and_results_repeat_bit_for_bit() -> None:
    run_ranks(3, _many_in_flight)


def _misfit() -> str:
    with pytest.raises(ValueError, match="one interval per rank") as refused:
        reduce_scatter_uneven(torch.zeros(10), ((0, 10),), _world())
    return str(refused.value)


def test_bounds_that_do_not_fit_are_refused() -> None:
    assert "((0, 10),)" in run_ranks(2, _misfit)[0]


def _swap_between_groups(total: int, rounds: int) -> None:
    """Ranks 0-1 and 2-4 hold one tensor each, cut differently; owners swap and add."""
    rank = dist.get_rank()
    first, second = shard_bounds(total, (3, 1), align=8), shard_bounds(total, (0, 1, 2), align=8)
    for step in range(rounds):
        in_first = rank < 2
        own = (torch.arange(total) + step).float() * (2.0 if in_first else 5.0)
        exchanges, targets = [], []
        for pair in itertools.product(range(2), range(2, 5)):
            both = intersection(first[pair[0]], second[pair[1] - 2])
            if rank not in pair or both is None:
                continue
            piece = own[slice(*both)]
            peer = pair[1] if in_first else pair[0]
            exchanges.append(
                IntervalExchange(peer=peer, send=piece, receive=torch.empty_like(piece))
            )
            targets.append(piece)
        exchange_intervals(exchanges, _world())
        for target, exchange in zip(targets, exchanges, strict=True):
            target.add_(exchange.receive)
        start, stop = first[rank] if in_first else second[rank - 2]
        expected = (torch.arange(total) + step).float() * 7.0
        assert torch.equal(own[start:stop], expected[start:stop])


def test_owners_in_two_groups_swap_overlapping_intervals() -> None:
    run_ranks(5, _swap_between_groups, 1000, 3)
