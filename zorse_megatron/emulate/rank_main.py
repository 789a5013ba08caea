"""One rank of an emulated job: `python -m zorse_megatron.emulate.rank_main`.

Takes the arguments of `zorse_megatron.pretrain`, and trains as that does, on the emulated clock.
"""

import atexit
import os

from zorse_megatron import pretrain
from zorse_megatron.emulate.job import EmulatedJob, current_job


def emulate(job: EmulatedJob, rank: int) -> None:
    """Put the emulation in place, before Megatron reads its arguments. For CPU mode only."""
    from zorse_megatron.adapter import cpu_mode

    cpu_mode.enable()
    from zorse_megatron.adapter.emulation_hooks import emulation_hooks
    from zorse_megatron.adapter.patches.registry import REGISTRY
    from zorse_megatron.emulate.backend import register
    from zorse_megatron.emulate.host_seams import host_hooks
    from zorse_megatron.emulate.memory_cap import MemoryCap
    from zorse_megatron.emulate.model_sizes import ModelSizes
    from zorse_megatron.emulate.pacer import Pacer
    from zorse_megatron.emulate.rank_clock import RankClock
    from zorse_megatron.emulate.seams import seam_hooks
    from zorse_megatron.emulate.switchboard import call

    clock = RankClock(call(job.address, rank), world_size=len(job.gpus), dilation=job.dilation)
    atexit.register(clock.finish)
    compute, memory = job.costs[rank].compute, job.costs[rank].memory
    sizes = ModelSizes(memory, sequence_length=job.sequence_length, hidden_size=job.hidden_size)
    register(clock, sizes)
    pacer = Pacer(
        clock,
        compute=compute,
        sizes=sizes,
        cap=MemoryCap(memory, sizes, capacity_bytes=job.capacities_bytes[rank], rank=rank),
        kind=job.kinds[rank],
        gpu=job.gpus[rank],
        host_bytes_per_s=job.host_bytes_per_s[rank],
        perturbation=job.perturbation,
        report=job.report(rank),
    )
    of_megatron = emulation_hooks(watch=pacer.watch, around_step=pacer.around_step)
    REGISTRY.apply({**seam_hooks(), **host_hooks(pacer), **of_megatron})


def main() -> None:
    """Entry point."""
    emulate(current_job(), int(os.environ["RANK"]))
    pretrain.main()


if __name__ == "__main__":
    main()
