"""The sum of squares of gradients and whether any is infinite or NaN, in one pass over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zorse_megatron.kernels.arguments import FLOATS, Problems, chunks
from zorse_megatron.kernels.dispatch import pick


@dataclass(frozen=True, kw_only=True)
class NormAndFlag:
    """Both results in one tensor, so that one all-reduce (sum) combines those of all ranks.

    `both`: [2] in fp64 on the shards' device: the sum of squares, the number of elements that are
    infinite or NaN. Nothing has waited for the device yet.
    """

    both: torch.Tensor

    @property
    def sum_of_squares(self) -> torch.Tensor:
        """0-d, fp64; infinite or NaN where an element is."""
        return self.both[0]

    @property
    def found_inf(self) -> torch.Tensor:
        """0-d, fp32: 1 where any element is infinite or NaN, else 0 (as Megatron's `found_inf`)."""
        return (self.both[1] > 0).float()


@torch.no_grad()
def norm_and_flag(shards: Sequence[torch.Tensor], device: torch.device) -> NormAndFlag:
    """Read each element of `shards` once.

    `shards`: 1-D and contiguous, on `device`, of any sizes (0 too), in fp32, bf16 or fp16; there
    may be none. Squares are exact in fp64 and added in fp64 in an order that depends on the sizes
    only, so two runs give the same bits, and a finite element never overflows. Raises ValueError
    with all that does not fit.
    """
    problems = Problems("norm_and_flag")
    for number, shard in enumerate(shards):
        problems.need_flat(f"shards[{number}]", shard, FLOATS)
        problems.need(
            shard.device == device,
            f"found shards[{number}] on {shard.device}; expected it on {device}",
        )
    problems.stop()
    return NormAndFlag(both=pick("norm_and_flag", device, norm_and_flag_torch)(shards, device))


def norm_and_flag_torch(shards: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The reference."""
    both = torch.zeros(2, dtype=torch.float64, device=device)
    for shard in shards:
        for chunk in chunks(shard.numel()):
            wide = shard[chunk].double()
            both[0] += wide.square().sum()
            both[1] += wide.isfinite().logical_not_().sum()
    return both
