"""The ranks of a measuring job: how they meet, talk, and end together."""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.errors import ZorseError
from zorse_megatron.measure.errors import MeasureError
from zorse_megatron.measure.ranks_env import RankPlace
from zorse_megatron.runtime.health import Heartbeat, is_communication_error

# While one rank measures the others wait, as long as it takes; the heartbeat notices a dead rank.
_WAIT = timedelta(hours=12)


@contextmanager
def measuring_job(place: RankPlace, *, timeout_s: float, messages_on_gpu: bool) -> Iterator[None]:
    """Join the job and watch the other ranks; a rank that fails or is gone stops all of them.

    `timeout_s`: how long a rank may be silent, twice over; `messages_on_gpu`: whether this
    process itself sends from GPUs, where there are any.
    """
    os.environ.update(place.torch_environment())
    if place.world_size == 1:
        os.environ["MASTER_PORT"] = "0"  # any: nobody else has to find it
    on_gpu = messages_on_gpu and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_WAIT)
    heartbeat = Heartbeat(
        # A connection of its own: the default one may be inside a blocking call.
        store=dist.distributed_c10d._get_default_store().clone(),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.world_size,
        timeout_s=timeout_s,
        describe=lambda rank: f"rank {rank}",
    )
    heartbeat.start()
    try:
        yield
        dist.barrier()
        heartbeat.finish()
    except KeyboardInterrupt as interrupt:
        heartbeat.fail(interrupt)
        raise
    except ZorseError as error:  # says all that there is to say
        heartbeat.fail(error)
        raise
    except Exception as error:
        traceback.print_exc()
        if is_communication_error(error):
            heartbeat.blame(error)
        heartbeat.fail(error)
        raise
    dist.destroy_process_group()


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
