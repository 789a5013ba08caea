"""`adamw_shard` against fp64, within the sum of its operations' rounding errors, and torch's."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.memory import (
    DEVICE,
    DTYPES,
    IS_INTERPRETED,
    bits,
    cheap,
    dtypes,
    guarded,
    poisoned,
    random,
    seeds,
    sizes,
)
from zorse_megatron.kernels.kernels import AdamW, adamw_shard

U = 2.0**-24
"""What rounding to fp32 changes a number by at most, relative to it."""
STEPS = 10 if IS_INTERPRETED else 30
SECOND_ORDER = 1 + 1e-4
"""Products of two errors, of at most some 100 U each, are left out below."""


@dataclass(frozen=True)
class Exact:
    """A state in fp64, and by how much each number in fp32 may be off."""

    main: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    off_main: torch.Tensor
    off_avg: torch.Tensor
    off_sq: torch.Tensor

    @classmethod
    def of(cls, main: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> "Exact":
        zero = torch.zeros(main.numel(), dtype=torch.float64)
        return cls(main.double(), exp_avg.double(), exp_avg_sq.double(), zero, zero, zero)

    def assert_close(self, *found: torch.Tensor) -> None:
        """Fails if `main`, `exp_avg` or `exp_avg_sq` is further off than rounding allows."""
        exact = (self.main, self.exp_avg, self.exp_avg_sq)
        allowed = (self.off_main, self.off_avg, self.off_sq)
        for number, right, off in zip(found, exact, allowed, strict=True):
            assert ((number.cpu().double() - right).abs() <= off * SECOND_ORDER).all()


def exact_step(old: Exact, grad: torch.Tensor, numbers: AdamW, scale: float) -> Exact:
    """One step by the definition in fp64; errors go through it and each operation adds one.

    Every operation rounds its result (U of it), every number of `numbers` is rounded to fp32 once
    (U of the product with it). A fused operation rounds less.
    """
    new1, new2 = 1 - numbers.beta1, 1 - numbers.beta2
    decay = numbers.weight_decay
    kept = 1 - numbers.lr * decay if numbers.decoupled else 1.0
    added = 0.0 if numbers.decoupled else decay
    g = grad.double() * scale
    off_g = 2 * U * g.abs()  # two products
    if added:
        g = g + added * old.main
        off_g = off_g + added * (old.off_main + 2 * U * old.main.abs()) + U * g.abs()

    far = g - old.exp_avg
    avg = old.exp_avg + new1 * far
    if numbers.beta1 > 0.5:  # avg + new1 * (g - avg)
        off_avg = numbers.beta1 * old.off_avg + new1 * (off_g + 3 * U * far.abs())
    else:  # g - (1 - new1) * (g - avg), where 1 - new1 is off by new1 U, and rounded
        off_avg = off_g + numbers.beta1 * (off_g + old.off_avg + 2 * U * far.abs()) + U * far.abs()
    off_avg = off_avg + U * avg.abs()

    square = new2 * g.square()
    sq = numbers.beta2 * old.exp_avg_sq + square
    off_sq = numbers.beta2 * (old.off_sq + 2 * U * old.exp_avg_sq) + 3 * U * square
    off_sq = off_sq + 2 * new2 * g.abs() * off_g + U * sq

    root, bias = sq.sqrt(), math.sqrt(1 - numbers.beta2**numbers.step)
    off_root = torch.where(sq > 0, off_sq / (2 * root), 0) + U * root
    divisor = root / bias + numbers.eps
    off_divisor = off_root / bias + 2 * U * root / bias + U * numbers.eps + U * divisor
    size = numbers.lr / (1 - numbers.beta1**numbers.step)
    moved = size * avg / divisor
    off_moved = size * (off_avg + 2 * U * avg.abs()) / divisor
    off_moved = off_moved + moved.abs() * (off_divisor / divisor + U)
    main = kept * old.main - moved
    off_main = kept * (old.off_main + 2 * U * old.main.abs()) + off_moved + U * main.abs()
    return Exact(main, avg, sq, off_main, off_avg, off_sq)


hyperparameters = st.builds(
    AdamW,
    lr=st.sampled_from([1e-4, 3e-3]),
    beta1=st.sampled_from([0.9, 0.3, 0.0]),
    beta2=st.sampled_from([0.95, 0.999]),
    eps=st.sampled_from([1e-8, 1e-5]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    step=st.integers(1, 1000),
    decoupled=st.booleans(),
)


@cheap
@given(
    numel=sizes,
    grad_dtype=dtypes,
    copy_dtype=st.sampled_from([None, *DTYPES]),
    numbers=hyperparameters,
    seed=seeds,
    on_device=st.booleans(),
)
def test_one_step(
    implementation: str,
    *,
    numel: int,
    grad_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    numbers: AdamW,
    seed: int,
    on_device: bool,
) -> None:
    old = (random(numel, seed), random(numel, seed + 1), random(numel, seed + 2).square())
    grad = random(numel, seed + 3, grad_dtype)
    state = [guarded(tensor) for tensor in old]
    there = guarded(grad)
    copy = None if copy_dtype is None else poisoned(numel, copy_dtype)
    scale, clip = 2.0**-7, 0.625  # exact in fp32
    adamw_shard(
        *(tensor.inner for tensor in state),
        there.inner,
        numbers,
        inv_scale=torch.tensor([scale], device=DEVICE) if on_device else scale,
        clip=torch.tensor(clip, device=DEVICE) if on_device else clip,
        copy=None if copy is None else copy.inner,
    )
    for tensor in state if copy is None else [*state, copy]:
        tensor.assert_guards_untouched()
    assert bits(there.whole).equal(bits(there.before))
    main, exp_avg, exp_avg_sq = (tensor.inner for tensor in state)
    exact = exact_step(Exact.of(*old), grad, numbers, scale * clip)
    exact.assert_close(main, exp_avg, exp_avg_sq)
    if copy is not None:
        assert bits(copy.inner).equal(bits(main.cpu().to(copy.inner.dtype)))


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_trajectory_is_that_of_torch(implementation: str, decoupled: bool) -> None:
    numel = 3001
    numbers = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}
    main, exp_avg, exp_avg_sq = random(numel, 0), torch.zeros(numel), torch.zeros(numel)
    exact = Exact.of(main, exp_avg, exp_avg_sq)
    parameter = torch.nn.Parameter(main.clone().to(DEVICE))
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    stock = kind([parameter], betas=(0.9, 0.95), foreach=False, **numbers)
    main, exp_avg, exp_avg_sq = (t.to(DEVICE) for t in (main, exp_avg, exp_avg_sq))
    for step in range(1, STEPS + 1):
        grad = random(numel, step)
        parameter.grad = grad.to(DEVICE)
        stock.step()
        now = AdamW(beta1=0.9, beta2=0.95, step=step, decoupled=decoupled, **numbers)
        adamw_shard(main, exp_avg, exp_avg_sq, grad.to(DEVICE), now)
        exact = exact_step(exact, grad, now, 1.0)
    theirs = (parameter.data, *(stock.state[parameter][k] for k in ("exp_avg", "exp_avg_sq")))
    exact.assert_close(*theirs)
    exact.assert_close(main, exp_avg, exp_avg_sq)
    # The bound means something: it allows half a unit in the last place per step or so.
    assert (exact.off_main / exact.main.abs()).median() < STEPS * 4 * U
    if implementation == "torch":
        assert all(map(torch.equal, theirs, (main, exp_avg, exp_avg_sq)))


def test_scales_as_megatron_does(implementation: str) -> None:
    # Unscaled by torch's kernel, then clipped, both rounded, and only then the step.
    grad, inv_scale, clip = random(1000, 3).to(DEVICE), 1 / 3000, 0.7
    by_hand = grad.clone()
    found_inf = torch.zeros(1, device=DEVICE)
    torch._amp_foreach_non_finite_check_and_unscale_(
        [by_hand], found_inf, torch.tensor(inv_scale, device=DEVICE)
    )
    by_hand *= clip
    numbers = AdamW(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
    results = []
    for number, scales in ((grad, {"inv_scale": inv_scale, "clip": clip}), (by_hand, {})):
        state = [random(1000, seed).to(DEVICE).abs() for seed in range(3)]
        adamw_shard(*state, number, numbers, **scales)
        results.append(state)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_with_its_weight(implementation: str, value: float) -> None:
    numbers = AdamW(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    state = [torch.ones(100, device=DEVICE) for _ in range(3)]
    grad = torch.ones(100, device=DEVICE)
    grad[41] = value
    copy = torch.zeros(100, dtype=torch.bfloat16, device=DEVICE)
    adamw_shard(*state, grad, numbers, copy=copy)
    for tensor in (*state, copy):
        is_finite = tensor.isfinite().cpu()
        assert not is_finite[41] and is_finite.sum() == 99


def test_what_does_not_fit_is_said_at_once(implementation: str) -> None:
    numbers = AdamW(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    half, short = torch.zeros(4, dtype=torch.float16), torch.zeros(3)
    with pytest.raises(ValueError) as caught:
        adamw_shard(torch.zeros(4), half, short, half, numbers)
    for said in ("exp_avg of shape (4,) in torch.float16", "exp_avg_sq of shape (3,)"):
        assert said in str(caught.value)
