"""One rank of the self-test: `python -m zorse_megatron.emulate.on_ranks.self_test_main`."""

import atexit
import json
import os

import torch
import torch.distributed as dist

from zorse_megatron.emulate.conductor import call
from zorse_megatron.emulate.emulated_job import (
    COMPUTE_S,
    LARGE_ELEMENTS,
    NUM_MESSAGES,
    SMALL_ELEMENTS,
    current_job,
)
from zorse_megatron.emulate.on_ranks.backend import BACKEND, register
from zorse_megatron.emulate.on_ranks.tensor_sizes import TensorSizes
from zorse_megatron.emulate.rank_clock import RankClock


def run_schedule(clock: RankClock) -> float:
    """This rank's part of it; returns when the rank ends."""
    clock.start()
    rank, is_last = dist.get_rank(), dist.get_rank() + 1 == dist.get_world_size()
    messages = [torch.zeros(SMALL_ELEMENTS) for _ in range(NUM_MESSAGES)]
    messages.append(torch.zeros(LARGE_ELEMENTS))
    # A transfer starts when both ends are there, so receives are posted ahead.
    coming = [dist.irecv(message, rank - 1) for message in messages] if rank else []
    leaving = []
    for number, message in enumerate(messages):
        is_small = number < NUM_MESSAGES
        if not is_small:
            dist.all_reduce(torch.zeros(1))
        if coming:
            _done(coming[number])
        clock.compute(COMPUTE_S if is_small else 0.0)
        if not is_last:
            leaving.append(dist.isend(message, rank + 1))
    end_s = clock.measured_s
    for work in leaving:
        _done(work)
    return end_s


def _done(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def main() -> None:
    """Entry point."""
    job, rank = current_job(), int(os.environ["RANK"])
    clock = RankClock(call(job.address, rank), world_size=len(job.gpus), dilation=job.dilation)
    atexit.register(clock.finish)
    register(clock, TensorSizes())
    dist.init_process_group(BACKEND)
    job.report(rank).write_text(json.dumps({"end_s": run_schedule(clock)}))
    dist.barrier()


if __name__ == "__main__":
    main()
