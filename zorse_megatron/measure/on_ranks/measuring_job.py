"""The ranks of a measuring job: how they meet, talk, and end together."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.adapter.found_software import gpu_of
from zorse_megatron.adapter.start_checks import refuse_unusable_gpu
from zorse_megatron.errors import MeasureError, ZorseError
from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.watch.hub_address import exchange
from zorse_megatron.watch.start import watched

# While one rank measures the others wait, as long as it takes; a dead rank is noticed all the same.
_WAIT = timedelta(hours=12)


@contextmanager
def measuring_job(launched: LaunchedRank, *, messages_on_gpu: bool) -> Iterator[None]:
    """Join the job; the block runs in a child of this process, which watches it as in training.

    A rank that fails or is gone stops all of them. `messages_on_gpu`: whether this process itself
    sends from GPUs, where there are any.
    """
    os.environ.update(launched.torch_environment())
    if launched.world_size == 1:
        os.environ["MASTER_PORT"] = "0"  # any: nobody else has to find it
    watch, hub = watched(os.environ, describe=lambda rank: f"rank {rank}", host=launched.node)
    with watch.last_words(all_refuse=False):
        store = exchange(watch, hub)
        watch.enter("while it measures")
        refuse_unusable_gpu(rank=launched.rank, local_rank=launched.local_rank, node=launched.node)
        on_gpu = messages_on_gpu and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(gpu_of(launched.local_rank))
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_WAIT)
        yield
        dist.barrier()
        dist.destroy_process_group()
        del store  # until here, for the ranks that still read from it


def from_rank(value: Any, source: int) -> Any:
    """Give the value of rank `source` to all ranks. Collective."""
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def from_all(value: Any) -> list[Any]:
    """Give the values of all ranks to all ranks, in their order. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first_rank(run: Callable[[], Any]) -> Any:
    """Run something on rank 0 and give its result to all ranks. Collective.

    A ZorseError there is raised on every rank, so that all of them say what is wrong.
    """
    outcome: tuple[Any, ZorseError | None] = (None, None)
    if dist.get_rank() == 0:
        try:
            outcome = (run(), None)
        except ZorseError as error:
            outcome = (None, MeasureError(error.title, error.problems))
    value, failure = from_rank(outcome, 0)
    if failure is not None:
        raise failure
    return value
