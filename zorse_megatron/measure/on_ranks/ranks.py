"""The ranks of a measuring job: how they meet, talk and end together; their devices and clock."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from zorse_megatron.adapter.start_checks import gpu_of, refuse_unusable_gpu
from zorse_megatron.files.quantities import COMPUTE_RATE
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.live.hub_address import exchange
from zorse_megatron.live.start_watch import watched
from zorse_megatron.measure.machine import (
    SeenDevice,
    SeenRank,
    host_memory_bytes,
    load_nvml,
    nics,
    seen_cpu,
    seen_gpu,
)
from zorse_megatron.measure.measured_cluster import MeasuredKind
from zorse_megatron.runtime.collectives import gathered

WARM_UP = 2
REPEATS = 5


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that `run` takes, after a warm-up."""
    for _ in range(WARM_UP):
        run()
    return median(timed_s(run, device) for _ in range(REPEATS))


def timed_s(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `run` takes once, until all of its work is done."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))


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


def seen_ranks(launched: LaunchedRank) -> list[SeenRank]:
    """Return what every rank sees. Collective. Raises MeasureError on a rank without a device."""
    on_node = gathered(launched.node).count(launched.node)
    return gathered(
        SeenRank(
            rank=launched.rank,
            node=launched.node,
            local_rank=launched.local_rank,
            device=_device(launched.local_rank, on_node),
            host_memory_bytes=host_memory_bytes(),
            nics=nics(),
        )
    )


def _device(local_rank: int, ranks_on_node: int) -> SeenDevice:
    if not torch.cuda.is_available():
        return seen_cpu(ranks_on_node)
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    return seen_gpu(load_nvml(), gpus, local_rank)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Large enough to fill the device, small enough for some seconds in all.
_GPU_WIDTH, _CPU_WIDTH = 8192, 256
_GPU_COPY_BYTES, _CPU_COPY_BYTES = 2**30, 2**26


def measured_kind(seen: SeenDevice) -> MeasuredKind:
    """Measure the device of this rank. Peak rates only if none are published."""
    device = torch.device("cuda" if seen.is_gpu else "cpu")
    well_known = seen.kind in GPU_KINDS
    width = _GPU_WIDTH if seen.is_gpu else _CPU_WIDTH
    return MeasuredKind(
        memory_bytes=seen.memory_bytes,
        memory_bytes_per_s=_copy_bytes_per_s(device),
        flops_per_s={} if well_known else _peak(width, device),
        host_link_bytes_per_s=_host_link_bytes_per_s(device),
        is_well_known=well_known,
    )


def _peak(width: int, device: torch.device) -> dict[str, float]:
    """Return the rate of each dtype. A CPU without units for one may be too slow to count."""
    rates = {name: _flops_per_s(dtype, width, device) for name, dtype in _DTYPES.items()}
    return {
        name: rate
        for name, rate in rates.items()
        if rate >= COMPUTE_RATE.lowest or name == "float32"
    }


def _flops_per_s(dtype: torch.dtype, width: int, device: torch.device) -> float:
    factor = torch.randn(width, width, device=device).to(dtype)
    return float(2 * width**3 / median_s(lambda: factor @ factor, device))


def _copy_bytes_per_s(device: torch.device) -> float:
    """A copy reads and writes every byte."""
    source, target = (_bytes(device, device.type == "cuda") for _ in range(2))
    return 2 * source.numel() / median_s(lambda: target.copy_(source), device)


def _host_link_bytes_per_s(device: torch.device) -> float:
    """From pinned host memory to the device; on a CPU a copy in memory."""
    on_gpu = device.type == "cuda"
    host, target = _bytes(torch.device("cpu"), on_gpu), _bytes(device, on_gpu)
    host = host.pin_memory() if on_gpu else host
    return host.numel() / median_s(lambda: target.copy_(host, non_blocking=True), device)


def _bytes(device: torch.device, on_gpu: bool) -> torch.Tensor:
    size = _GPU_COPY_BYTES if on_gpu else _CPU_COPY_BYTES
    return torch.zeros(size, dtype=torch.uint8, device=device)
