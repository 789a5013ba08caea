"""The owner's half of an uneven reduce-scatter: add what the others sent, in fp32."""

from collections.abc import Sequence

import torch

from zorse_megatron.kernels.arguments import FLOATS, Problems, chunks
from zorse_megatron.kernels.dispatch import pick


@torch.no_grad()
def sum_parts(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weights: Sequence[float] | None = None,
    *,
    add: bool = False,
) -> None:
    """Write weights[0] * parts[0] + weights[1] * parts[1] + ... into the fp32 `out`.

    `out`: [n], contiguous. `parts`: k tensors [n] on its device, each in fp32, bf16 or fp16 (rows
    of what an all-to-all received, and this rank's own part, say); one of them may be `out` itself,
    otherwise none overlaps it. Parts that start at multiples of 16 bytes are read fastest.
    `weights`: k numbers, rounded to fp32; None: ones. `add`: add to what is in `out`, which then
    comes first.

    Each part is widened to fp32 (exact), multiplied (rounded once) and added (rounded once) in the
    order of `parts`, never fused: the bits depend on the arguments alone, not on what arrived
    first nor on the device. With no parts `out` becomes zero, or stays with `add`. Raises
    ValueError with all that does not fit.
    """
    factors = (1.0,) * len(parts) if weights is None else tuple(map(float, weights))
    problems = Problems("sum_parts")
    problems.need_flat("out", out, (torch.float32,))
    problems.need(
        len(factors) == len(parts),
        f"found {len(factors)} weights for {len(parts)} parts; expected one each",
    )
    for number, part in enumerate(parts):
        problems.need_flat(f"parts[{number}]", part, FLOATS, like=out)
        is_out = part.data_ptr() == out.data_ptr() and part.dtype == out.dtype
        if not is_out:
            problems.need_apart({"out": out, f"parts[{number}]": part})
    problems.stop()
    pick("sum_parts", out.device, sum_parts_torch)(out, tuple(parts), factors, add)


def sum_parts_torch(
    out: torch.Tensor, parts: tuple[torch.Tensor, ...], weights: tuple[float, ...], add: bool
) -> None:
    """The reference."""
    for chunk in chunks(out.numel()):
        here = out[chunk]
        # The first term is not added to zero: -0.0 stays as it is.
        total = here.clone() if add else None
        for part, weight in zip(parts, weights, strict=True):
            # A product of its own: `add_(part, alpha=weight)` is fused on some processors.
            term = part[chunk].float() * weight
            total = term if total is None else total.add_(term)
        here.copy_(torch.zeros_like(here) if total is None else total)
