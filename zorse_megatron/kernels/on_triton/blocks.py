"""What the kernels share: which elements a launch and its programs work on, and rounding."""

from collections.abc import Iterator

import triton
import triton.language as tl

BLOCK = tl.constexpr(2048)
NUM_WARPS = 8
"""With 2048 elements a thread has 8: one load of 16 bytes for 16-bit numbers, two for fp32."""


def launches(numel: int) -> Iterator[slice]:
    """Cut `numel` elements into a multiple of 16 and the rest, neither of them empty.

    Triton reads 16 bytes at a time only where it knows that none of them lies beyond the end, which
    it concludes from a number of elements that is a multiple of 16.
    """
    rest = numel // 16 * 16
    return (here for here in (slice(0, rest), slice(rest, numel)) if here.start < here.stop)


def grid_for(numel: int) -> tuple[int]:
    """One program per block."""
    return (triton.cdiv(numel, BLOCK.value),)


@triton.jit
def elements_of(block, BLOCK: tl.constexpr):
    """Positions of a block's elements, in 64 bits: 2^31 elements of fp32 are but 8 GiB."""
    return block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def rounded_to(values, dtype: tl.constexpr):
    """fp32 `values` as `dtype`, to nearest even.

    Triton's interpreter cuts bf16 off where processors round, hence the bits: half a unit in the
    last kept place is added, less one where the tie would go to an odd number. NaN stays NaN.
    """
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        kept = bits >> 16
        near = (bits + 0x7FFF + (kept & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        result = tl.where(is_nan, kept | 0x40, near).to(tl.uint16)
        return result.to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
