"""Pieces of a flat buffer into one contiguous buffer, with another dtype on the way."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from zorse_megatron.kernels.arguments import FLOATS, Problems
from zorse_megatron.kernels.dispatch import pick
from zorse_megatron.schedules.shards import Interval


@torch.no_grad()
def pack(packed: torch.Tensor, whole: torch.Tensor, pieces: Sequence[Interval]) -> None:
    """Copy the elements of `whole` that `pieces` name into `packed`, one piece after the other.

    `whole` and `packed`: 1-D and contiguous, on one device, not overlapping, each in fp32, bf16 or
    fp16; numbers are rounded to nearest even where `packed` is narrower, beyond its range they
    become infinite. `pieces`: intervals (start, stop) of `whole` in any order, empty ones too, also
    overlapping ones; their lengths add up to that of `packed`. Raises ValueError with all that does
    not fit.
    """
    _check(packed, whole, pieces)
    pick("pack", whole.device, pack_torch)(packed, whole, tuple(pieces))


def _check(packed: torch.Tensor, whole: torch.Tensor, pieces: Sequence[Interval]) -> None:
    problems = Problems("pack")
    problems.need_flat("packed", packed, FLOATS)
    problems.need_flat("whole", whole, FLOATS)
    problems.need(
        packed.device == whole.device,
        f"found packed on {packed.device} and whole on {whole.device}; expected one device",
    )
    problems.need_apart({"packed": packed, "whole": whole})
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
    stops = accumulate(stop - start for start, stop in pieces)
    for (start, stop), end in zip(pieces, stops, strict=True):
        packed[end - (stop - start) : end].copy_(whole[start:stop])
