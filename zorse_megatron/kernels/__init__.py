"""One-pass kernels that move or update whole shards.

Every kernel is a function with two bodies: Triton (`on_triton/`) and plain torch, which is the
reference and runs wherever Triton does not. `dispatch` decides which, and says so once.
"""

from zorse_megatron.kernels.adamw_shard import AdamW, adamw_shard
from zorse_megatron.kernels.norm_and_flag import NormAndFlag, norm_and_flag
from zorse_megatron.kernels.pieces import pack
from zorse_megatron.kernels.sum_parts import sum_parts

__all__ = [
    "AdamW",
    "NormAndFlag",
    "adamw_shard",
    "norm_and_flag",
    "pack",
    "sum_parts",
]
