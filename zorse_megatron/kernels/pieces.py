"""Pieces of a flat buffer to and from one contiguous buffer, with another dtype on the way."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from zorse_megatron.kernels.arguments import FLOATS, Problems
from zorse_megatron.kernels.dispatch import pick
from zorse_megatron.schedules.shards import Interval


@torch.no_grad()
def pack(packed: torch.Tensor, whole: torch.Tensor, pieces: Sequence[Interval]) -> None:
    """Copy the elements of `whole` that `pieces` name into `packed`, one piece behind the other.

    `whole` and `packed`: 1-D and contiguous, on one device, not overlapping, each in fp32, bf16 or
    fp16; numbers are rounded to nearest even where `packed` is narrower, beyond its range they
    become infinite. `pieces`: intervals (start, stop) of `whole` in any order, empty ones too, also
    overlapping ones; their lengths add up to that of `packed`. Raises ValueError with all that does
    not fit.
    """
    _check("pack", packed, whole, pieces)
    pick("pack", whole.device, pack_torch)(packed, whole, tuple(pieces))


@torch.no_grad()
def unpack(whole: torch.Tensor, packed: torch.Tensor, pieces: Sequence[Interval]) -> None:
    """The way back: copy `packed` to the `pieces` of `whole`, and write nothing between them.

    As `pack`; but `pieces` that overlap are refused, for the result would depend on who is last.
    """
    _check("unpack", packed, whole, pieces)
    in_order = sorted(piece for piece in pieces if piece[0] < piece[1])
    for one, other in pairwise(in_order):
        if other[0] < one[1]:
            raise ValueError(f"unpack: found pieces {one} and {other}; expected disjoint ones")
    pick("unpack", whole.device, unpack_torch)(whole, packed, tuple(pieces))


def _check(
    kernel: str, packed: torch.Tensor, whole: torch.Tensor, pieces: Sequence[Interval]
) -> None:
    problems = Problems(kernel)
    problems.need_flat("packed", packed, FLOATS)
    problems.need_flat("whole", whole, FLOATS)
    problems.need(
        packed.device == whole.device,
        f"found packed on {packed.device} and whole on {whole.device}; expected one device",
    )
    outside = [piece for piece in pieces if not 0 <= piece[0] <= piece[1] <= whole.numel()]
    problems.need(
        not outside,
        f"found pieces {outside[:3]}; expected intervals (start, stop) within "
        f"{whole.numel()} elements",
    )
    total = sum(stop - start for start, stop in pieces)
    problems.need(
        total == packed.numel(),
        f"found pieces of {total} elements together; expected {packed.numel()}, the size of packed",
    )
    problems.stop()


def pack_torch(packed: torch.Tensor, whole: torch.Tensor, pieces: tuple[Interval, ...]) -> None:
    """The reference."""
    for there, here in _pairs(pieces):
        packed[there].copy_(whole[here])


def unpack_torch(whole: torch.Tensor, packed: torch.Tensor, pieces: tuple[Interval, ...]) -> None:
    """The reference."""
    for there, here in _pairs(pieces):
        whole[here].copy_(packed[there])


def _pairs(pieces: tuple[Interval, ...]) -> Iterator[tuple[slice, slice]]:
    """Each piece's place in the packed buffer and in the whole."""
    stops = accumulate(stop - start for start, stop in pieces)
    for (start, stop), end in zip(pieces, stops, strict=True):
        yield slice(end - (stop - start), end), slice(start, stop)
