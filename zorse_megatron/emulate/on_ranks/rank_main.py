"""One rank of an emulated job: `python -m zorse_megatron.emulate.on_ranks.rank_main`.

Takes the arguments of `zorse_megatron.pretrain`, and trains as that does, on the emulated clock.
"""

import atexit
import os
from datetime import timedelta
from functools import partial

from zorse_megatron import pretrain
from zorse_megatron.adapter.plan_run import RankSetup
from zorse_megatron.emulate.emulated_job import EmulatedJob, current_job
from zorse_megatron.emulate.tiny_model import TIMEOUT_MINUTES


def emulate(job: EmulatedJob, rank: int) -> RankSetup:
    """Put the emulation in place, before Megatron reads its arguments. For CPU mode only."""
    from zorse_megatron.adapter import cpu_mode

    cpu_mode.enable()
    import torch.distributed as dist

    from zorse_megatron.adapter.model.chunk_view import emulation_hooks
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.emulate.conductor import EmulatedTime, RankClock, call
    from zorse_megatron.emulate.on_ranks.backend import BACKEND, register
    from zorse_megatron.emulate.on_ranks.memory_cap import MemoryCap
    from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes
    from zorse_megatron.emulate.on_ranks.pacer import Pacer

    clock = RankClock(call(job.address, rank))
    atexit.register(clock.finish)
    sizes, capacity_bytes = ModelSizes(job, rank), job.capacities_bytes[rank]
    register(clock, sizes)
    cap = MemoryCap(sizes, capacity_bytes=capacity_bytes, rank=rank, kind=job.kinds[rank])
    pacer = Pacer(clock, job, rank, sizes=sizes, cap=cap)
    REGISTRY.apply(emulation_hooks(watch=pacer.watch, around_step=pacer.around_step))
    return RankSetup(
        # Megatron's --distributed-backend knows nccl and gloo only, but it trains on the process
        # group that is there already, and makes its others in the same backend.
        init_process_group=partial(
            dist.init_process_group, BACKEND, timeout=timedelta(minutes=TIMEOUT_MINUTES)
        ),
        make_host_link=lambda _device: pacer.host,
        clock=EmulatedTime(clock),
    )


def main() -> None:
    """Entry point."""
    pretrain.main(setup=emulate(current_job(), int(os.environ["RANK"])))


if __name__ == "__main__":
    main()
