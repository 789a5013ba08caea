"""Before Megatron is imported: can all ranks train on their GPUs with what is installed there?

Ranks tell each other through the store in which they meet, because a GPU for which torch has no
code cannot take part in a collective call.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist

from zorse_megatron.adapter.found_software import found_software
from zorse_megatron.log import say
from zorse_megatron.schema.gpus.gpu import ComputeDtype
from zorse_megatron.software.found_lines import found_lines
from zorse_megatron.software.machine_flags import with_gpu_flags
from zorse_megatron.software.rank_software import RankSoftware
from zorse_megatron.software.start_problems import refuse_start

_KEY = "zorse/software"


def checked_gpu_flags(
    flags: Sequence[str],
    *,
    node: str,
    store: dist.Store | None = None,
    dtypes: Sequence[ComputeDtype] = (),
) -> list[str]:
    """Check all ranks, and return Megatron's flags with those that this rank needs.

    On a rank without a GPU they come back as they are. `store`: where all ranks meet; None: only
    this rank is looked at. `dtypes`: rank -> what it computes in. Raises StartError on every rank
    with all that is wrong on any, also flags that need Transformer Engine where there is none.
    """
    mine = found_software(int(os.environ.get("RANK", "0")), _local_rank(), node)
    words = list(flags)
    command = None
    if mine.gpu is not None:
        command = with_gpu_flags(flags, mine)
        words = list(command.words)
        # The others have to know of refused flags, or they would wait for this rank.
        mine = replace(mine, transformer_impl=command.transformer_impl, refused=command.refused)
    ranks = [mine] if store is None else _exchanged(store, mine)
    refuse_start(ranks, () if store is None else dtypes, sees_all=store is not None)
    for line in found_lines(ranks):
        say(line)
    added = None if command is None else command.told
    if added is not None:
        say(added, on_each_node=True)
    return words


def refuse_unusable_gpu(*, rank: int, local_rank: int, node: str) -> None:
    """Raise StartError where torch has no code for this rank's GPU; for ranks that only measure."""
    refuse_start([found_software(rank, local_rank, node)], sees_all=False)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _exchanged(store: dist.Store, mine: RankSoftware) -> list[RankSoftware]:
    # torchrun keeps its store when it starts ranks again (--max-restarts).
    key = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{key}/{mine.rank}", mine.to_json())
    if mine.rank == 0:
        world = range(int(os.environ["WORLD_SIZE"]))
        texts = [store.get(f"{key}/{rank}").decode() for rank in world]
        store.set(key, "\n".join(texts))
    return [RankSoftware.from_json(line) for line in store.get(key).decode().splitlines()]
