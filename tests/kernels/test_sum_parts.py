"""`sum_parts`: the rule bit by bit, error bounds, order, aliases, and what 16-bit messages cost."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.memory import (
    DEVICE,
    bits,
    cheap,
    dtypes,
    guarded,
    poisoned,
    random,
    seeds,
    sizes,
)
from zorse_megatron.kernels.kernels import sum_parts

U32 = 2.0**-24
"""What rounding to fp32 changes a number by at most, relative to it."""


def by_rule(parts: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The documented rule, in numpy: every product and every sum rounded to fp32, in order."""
    terms = [p.float().numpy() * np.float32(w) for p, w in zip(parts, weights, strict=True)]
    total = terms[0]
    with np.errstate(invalid="ignore"):  # the difference of infinities
        for term in terms[1:]:
            total = (total + term).astype(np.float32)
    return torch.from_numpy(total)


@cheap
@given(sizes, st.lists(dtypes, max_size=18), seeds)
def test_follows_the_rule_and_stays_within_the_bound(
    implementation: str, numel: int, part_dtypes: list[torch.dtype], seed: int
) -> None:
    parts = [random(numel, seed + i, dtype) for i, dtype in enumerate(part_dtypes)]
    weights = np.random.default_rng(seed).uniform(0.01, 2, len(parts)).tolist()
    out = poisoned(numel)
    sum_parts(out.inner, [guarded(part).inner for part in parts], weights)
    out.assert_guards_untouched()
    found = out.inner.cpu()
    if not parts:
        assert found.equal(torch.zeros(numel))
        return
    assert bits(found).equal(bits(by_rule(parts, weights)))
    # Against fp64, with the weights as given: a weight and a product are rounded once, and each
    # term takes part in at most as many sums as there are terms.
    wide = [part.double() * weight for part, weight in zip(parts, weights, strict=True)]
    bound = (len(wide) + 2) * U32 * (1 + 1e-6) * torch.stack(wide).abs().sum(0)
    assert ((found.double() - torch.stack(wide).sum(0)).abs() <= bound).all()


@cheap
@given(seeds, st.lists(dtypes, min_size=1, max_size=5))
def test_infinity_and_nan_go_through(
    implementation: str, seed: int, part_dtypes: list[torch.dtype]
) -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0])
    source = torch.Generator().manual_seed(seed)
    parts = [special[torch.randint(6, (40,), generator=source)].to(d) for d in part_dtypes]
    out = poisoned(40)
    sum_parts(out.inner, [part.to(DEVICE) for part in parts])
    assert bits(out.inner).equal(bits(by_rule(parts, [1.0] * len(parts))))


@pytest.mark.parametrize("count", [2, 7, 16, 17, 40])
def test_the_order_is_that_of_the_list_wherever_the_parts_lie(
    implementation: str, count: int
) -> None:
    parts = [random(999, i, torch.bfloat16) for i in range(count)]
    parts[0], parts[-1] = parts[0] * 2.0**20, parts[-1] * 2.0**20
    results = []
    for seed in range(3):  # rows of what arrived, in another order each time
        place = np.random.default_rng(seed).permutation(count)
        arrived = torch.full((count, 1000), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        for part, row in zip(parts, place, strict=True):
            arrived[row, :999] = part
        out = poisoned(999)
        sum_parts(out.inner, [arrived[row, :999] for row in place])
        results.append(bits(out.inner))
    assert results[0].equal(results[1]) and results[0].equal(results[2])
    if count > 2:  # the data would show another order
        out = poisoned(999)
        sum_parts(out.inner, [part.to(DEVICE) for part in reversed(parts)])
        assert not results[0].equal(bits(out.inner))


@pytest.mark.parametrize("place", [0, 3, 16, 19])
def test_a_part_may_be_the_result(implementation: str, place: int) -> None:
    parts = [random(2500, i, torch.bfloat16) for i in range(20)]
    own = random(2500, 77)
    expected = by_rule([*parts[:place], own, *parts[place + 1 :]], [0.5] * 20)
    out = guarded(own)
    there = [part.to(DEVICE) for part in parts]
    there[place] = out.inner
    sum_parts(out.inner, there, [0.5] * 20)
    assert bits(out.inner).equal(bits(expected))


def rounding_of_bf16() -> float:
    """Mean square of what rounding to bf16 changes normal numbers of variance 1 by, in closed form.

    Between 2^e and 2^(e+1) bf16 has steps of 2^(e-7); the error is uniform over a step, so its mean
    square is a twelfth of the step's square.
    """
    below = NormalDist().cdf
    return sum(
        2 * (below(2.0 ** (e + 1)) - below(2.0**e)) * 4.0 ** (e - 7) / 12 for e in range(-40, 10)
    )


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_16_bit_messages_with_fp32_sums_beat_a_bf16_reduction(
    implementation: str, count: int
) -> None:
    # k numbers of variance 1. 16-bit messages round k - 1 of them: an owner's own stays. A bf16
    # reduction rounds all k, and each sum of j = 2 ... k of them, whose variance is j. The mean
    # square of rounding grows with the variance, so the ratio of mean squares is
    #   (k + 2 + 3 + ... + k) / (k - 1) = k / 2 + 2 + 1 / (k - 1),
    # and still above k / 2 + 1 if sums of two, which often need no rounding, were all exact.
    numel = 100_000 if implementation == "torch" else 20_000
    parts = [
        torch.from_numpy(np.random.default_rng(i).standard_normal(numel)) for i in range(count)
    ]
    exact = torch.stack(parts).sum(0)
    out = poisoned(numel)
    sent = [parts[0].float(), *(part.float().bfloat16() for part in parts[1:])]
    sum_parts(out.inner, [part.to(DEVICE) for part in sent])
    narrow = (out.inner.cpu().double() - exact).square()
    total = parts[0].bfloat16()
    for part in parts[1:]:
        total = (total.float() + part.bfloat16().float()).bfloat16()
    plain = (total.double() - exact).square()

    # A mean of n numbers is off by less than 5 of its standard deviations.
    allowed = 5 * narrow.std().item() / numel**0.5
    assert abs(narrow.mean().item() - (count - 1) * rounding_of_bf16()) < allowed
    assert plain.mean() / narrow.mean() > count / 2 + 1


def test_what_does_not_fit_is_said_at_once(implementation: str) -> None:
    out = torch.zeros(4, device=DEVICE)
    parts = [torch.zeros(5, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)]
    with pytest.raises(ValueError, match=r"parts\[0\] of shape \(5,\).*parts\[1\].*torch\.int32"):
        sum_parts(out, parts)
