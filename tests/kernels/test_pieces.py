"""`pack`: every pair of dtypes, every kind of piece, places beyond 2^31, rounding."""

from itertools import accumulate
from pathlib import Path

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
)
from zorse_megatron.kernels.kernels import pack
from zorse_megatron.schedule.shards import Interval

gaps = st.one_of(st.sampled_from([0, 0, 1, 8, 16, 64]), st.integers(0, 3000))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[Interval]]:
    """A number of elements and disjoint pieces of them, empty ones too, in any order."""
    marks = [0, *accumulate(draw(st.lists(gaps, min_size=1, max_size=9)))]
    pieces = list(zip(marks[1::2], marks[2::2], strict=False))
    return marks[-1], draw(st.permutations(pieces))


def cut_out(whole: torch.Tensor, pieces: list[Interval]) -> torch.Tensor:
    return torch.cat([whole[:0], *(whole[start:stop] for start, stop in pieces)])


@cheap
@given(cuts(), dtypes, dtypes, seeds)
def test_every_piece_of_every_dtype(
    implementation: str,
    cut: tuple[int, list[Interval]],
    whole_dtype: torch.dtype,
    packed_dtype: torch.dtype,
    seed: int,
) -> None:
    numel, pieces = cut
    whole = random(numel, seed, whole_dtype)
    expected = cut_out(whole, pieces).to(packed_dtype)
    packed = poisoned(len(expected), packed_dtype)
    pack(packed.inner, guarded(whole).inner, pieces)
    packed.assert_guards_untouched()
    assert bits(packed.inner).equal(bits(expected))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounds_to_nearest_even_at_every_step(implementation: str, dtype: torch.dtype) -> None:
    # Around every number that bf16 can hold, of both signs, infinities and NaN among them: the
    # number, just above, just below half way, half way, just above it, just below the next one.
    every = 7 if IS_INTERPRETED or dtype is not torch.bfloat16 else 1
    upper = torch.arange(0, 2**16, every, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    # For fp16, whose half way has another place.
    lower = torch.cat([lower, torch.tensor([0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001])])
    numbers = (upper[:, None] | lower).flatten()
    numbers = torch.where(numbers < 2**31, numbers, numbers - 2**32).to(torch.int32)
    whole = numbers.view(torch.float32)
    packed = poisoned(len(whole), dtype)
    pack(packed.inner, whole.to(DEVICE), [(0, len(whole))])
    assert bits(packed.inner).equal(bits(whole.to(dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_places_beyond_2_to_the_31(implementation: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("needs memory that is addressed but not taken")
    numel = 2**32 + 5000
    # A file without contents: 8 or 16 GiB of addresses, a few pages of memory.
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(numel * dtype.itemsize)
    whole = torch.from_file(str(tmp_path / "sparse"), shared=True, size=numel, dtype=dtype)
    pieces = [(2**31 - 5, 2**31 + 4000), (2**32 + 1, 2**32 + 4500), (16, 48)]
    values = random(sum(stop - start for start, stop in pieces), 1, dtype)
    for (start, stop), end in zip(pieces, accumulate(b - a for a, b in pieces), strict=True):
        whole[start:stop] = values[end - (stop - start) : end]
    found = torch.empty_like(values)
    pack(found, whole, pieces)
    assert found.equal(values)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_packing_in_place_is_refused(implementation: str, place: int) -> None:
    memory = torch.arange(8.0, device=DEVICE)
    whole, packed = memory[:4], memory[place : place + 4]
    with pytest.raises(ValueError, match="found packed and whole in the same memory"):
        pack(packed, whole, [(0, 4)])
    assert memory.tolist() == list(range(8))
    pack(memory[4:], whole, [(0, 4)])  # side by side
    assert memory.tolist() == [0, 1, 2, 3] * 2


def test_what_does_not_fit_is_said(implementation: str) -> None:
    packed, whole = torch.zeros(3, device=DEVICE), torch.zeros(10, device=DEVICE)
    for pieces, said in [
        ([(8, 11)], "(8, 11)"),
        ([(4, 2), (0, 5)], "(4, 2)"),
        ([(0, 2)], "2 elements together; expected 3"),
    ]:
        with pytest.raises(ValueError) as caught:
            pack(packed, whole, pieces)
        assert said in str(caught.value)
