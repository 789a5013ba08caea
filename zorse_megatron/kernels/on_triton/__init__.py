"""The kernels in Triton, by name. Each takes what its plain torch version takes.

With `TRITON_INTERPRET=1` they run on CPU tensors too: so are they tested.
"""

from collections.abc import Callable
from typing import Any

from zorse_megatron.kernels.on_triton.adamw_shard import adamw_shard
from zorse_megatron.kernels.on_triton.norm_and_flag import norm_and_flag
from zorse_megatron.kernels.on_triton.pieces import pack
from zorse_megatron.kernels.on_triton.sum_parts import sum_parts

KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel for kernel in (adamw_shard, norm_and_flag, pack, sum_parts)
}
