"""The usual entry, with sums of gradients that arrive as late or as early as they can.

`ZORSE_TEST_SUMS=late`: not before somebody has to wait for them; `early`: as soon as anybody asks
whether they have. Between the two is what a network does, which no test can foresee.
"""

import os
from typing import Any

from tests.megatron.small_pieces import use_small_pieces
from zorse_megatron import pretrain
from zorse_megatron.adapter.cpu import cpu_mode


def is_reduced(shards: Any) -> bool:
    if os.environ["ZORSE_TEST_SUMS"] == "late":
        return False
    if shards._reduction is not None:
        shards._reduction.wait()
    return True


if __name__ == "__main__":
    use_small_pieces()
    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter.data_parallel.chunk_shards import ChunkShards

    ChunkShards.is_reduced = property(is_reduced)  # type: ignore[assignment]
    pretrain.main()
