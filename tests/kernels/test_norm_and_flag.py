"""`norm_and_flag` against exact sums, with infinities and NaN, and twice with the same bits."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.memory import DEVICE, cheap, dtypes, guarded, random, seeds, sizes
from zorse_megatron.kernels.kernels import norm_and_flag

U64 = 2.0**-53


def exact(shards: list[torch.Tensor]) -> float:
    """Correctly rounded: squares of 24-bit numbers are exact in fp64, `fsum` rounds once."""
    return math.fsum(x * x for shard in shards for x in shard.double().tolist())


@cheap
@given(st.lists(st.tuples(sizes, dtypes), max_size=5), seeds)
def test_sum_of_squares_of_unequal_shards(
    implementation: str, kinds: list[tuple[int, torch.dtype]], seed: int
) -> None:
    shards = [random(numel, seed + i, dtype) for i, (numel, dtype) in enumerate(kinds)]
    there = [guarded(shard).inner for shard in shards]
    found = norm_and_flag(there, DEVICE)
    assert found[0].dtype is torch.float64
    assert found[1].item() == 0
    # Terms >= 0: each takes part in fewer additions than there are terms, each rounded once.
    expected, terms = exact(shards), sum(shard.numel() for shard in shards)
    assert abs(found[0].item() - expected) <= (terms + 1) * U64 * expected
    assert norm_and_flag(there, DEVICE).equal(found)


@cheap
@given(sizes, dtypes, seeds, st.lists(st.sampled_from([math.inf, -math.inf, math.nan])))
def test_tells_what_is_not_finite(
    implementation: str, numel: int, dtype: torch.dtype, seed: int, special: list[float]
) -> None:
    shard = random(numel, seed, dtype)
    special = special[:numel]
    places = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[: len(special)]
    shard[places] = torch.tensor(special).to(dtype)
    found = norm_and_flag([guarded(shard).inner], DEVICE)
    assert (found[1].item() != 0) == bool(len(special))
    assert math.isfinite(found[0].item()) == (not special)


def test_finite_numbers_neither_overflow_nor_vanish(implementation: str) -> None:
    large, small = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
    found = norm_and_flag([torch.tensor([large, -large], device=DEVICE)], DEVICE)
    assert found[0].item() == 2 * large * large and found[1].item() == 0
    found = norm_and_flag([torch.tensor([small], device=DEVICE)], DEVICE)
    assert found[0].item() == small * small
