"""`kernels.norm_and_flag` in Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from zorse_megatron.kernels.on_triton.blocks import (
    BLOCK,
    NUM_WARPS,
    elements_of,
    grid_for,
    launches,
)

MAX_PROGRAMS = 16384
"""Of a launch, on every GPU: the order of the sum must not depend on the number of processors. Many
times as many as run at once, so that no processor idles for long at the end."""


@triton.jit
def norm_and_flag_kernel(shard, numel, turns, sums, counts, BLOCK: tl.constexpr):
    """Program p of P adds up blocks p, p + P, p + 2P ..., `turns` of them."""
    squares = tl.zeros([BLOCK], tl.float64)
    not_finite = tl.zeros([BLOCK], tl.int32)
    for turn in range(turns):
        at = elements_of(tl.program_id(0) + turn * tl.num_programs(0), BLOCK)
        values = tl.load(shard + at, mask=at < numel, other=0.0).to(tl.float32)
        wide = values.to(tl.float64)
        squares += wide * wide
        not_finite += (tl.abs(values) < float("inf")).to(tl.int32) ^ 1
    tl.store(sums + tl.program_id(0), tl.sum(squares))
    tl.store(counts + tl.program_id(0), tl.sum(not_finite.to(tl.int64)).to(tl.float64))


def norm_and_flag(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """As `norm_and_flag_torch`: one launch or two per shard, and one for what they found."""
    pieces = [shard[here] for shard in shards for here in launches(shard.numel())]
    programs = [min(grid_for(piece.numel())[0], MAX_PROGRAMS) for piece in pieces]
    found = torch.empty(2, sum(programs), dtype=torch.float64, device=device)
    start = 0
    with torch.cuda.device_of(found):
        for piece, count in zip(pieces, programs, strict=True):
            norm_and_flag_kernel[(count,)](
                piece,
                piece.numel(),
                triton.cdiv(piece.numel(), BLOCK.value * count),
                found[0, start:],
                found[1, start:],
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
            )
            start += count
        return found.sum(1)
