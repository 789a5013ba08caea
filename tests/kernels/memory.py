"""Tensors that show who writes outside of them, and comparison bit by bit."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.examples import examples

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 64

cheap = settings(
    max_examples=examples(24), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
"""For property tests: the interpreter takes a millisecond per program."""

sizes = st.one_of(
    st.sampled_from([0, 1, 2, 15, 16, 17, 2047, 2048, 2049, 4096 + 5]), st.integers(0, 5000)
)
"""0, 1, odd ends, around the size of a block, and anything."""
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)


@dataclass(frozen=True)
class Guarded:
    """A tensor inside a larger one, whose elements before and after it must not change."""

    whole: torch.Tensor
    inner: torch.Tensor
    before: torch.Tensor

    def assert_guards_untouched(self) -> None:
        """Fails if anything outside of `inner` has changed."""
        now = self.whole.clone()
        end = GUARD + self.inner.numel()
        now[GUARD:end] = self.before[GUARD:end]
        assert bits(now).equal(bits(self.before))


def guarded(values: torch.Tensor) -> Guarded:
    """A copy of `values` on the device, NaN around it."""
    whole = torch.full((values.numel() + 2 * GUARD,), torch.nan, dtype=values.dtype, device=DEVICE)
    inner = whole[GUARD : GUARD + values.numel()]
    inner.copy_(values)
    return Guarded(whole, inner, whole.clone())


def poisoned(numel: int, dtype: torch.dtype = torch.float32) -> Guarded:
    """To be written: NaN everywhere."""
    return guarded(torch.full((numel,), torch.nan, dtype=dtype))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits as integers, on the CPU; all NaNs count as one."""
    number = tensor.detach().cpu()
    number = torch.where(number.isnan(), torch.full_like(number, torch.nan), number)
    return number.view({4: torch.int32, 2: torch.int16, 8: torch.int64}[number.element_size()])


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers times powers of two between 2^-6 and 2^6, on the CPU."""
    source = np.random.default_rng(seed)
    numbers = source.standard_normal(numel) * 2.0 ** source.integers(-6, 7, numel)
    return torch.from_numpy(numbers).to(dtype)
