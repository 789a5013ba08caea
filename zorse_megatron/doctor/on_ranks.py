"""What ranks of checks do that is no training: `... doctor.on_ranks CHECK ANSWER.json ARGUMENTS`.

Rank 0 writes the answer. Without a GPU they talk over gloo, which is how they are tested.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.adapter.groups.process_groups import create_groups, nccl_channels
from zorse_megatron.adapter.start_checks import found_software, gpu_of
from zorse_megatron.costs.process_memory import CONTEXT_BYTES, communicator_bytes
from zorse_megatron.doctor.report import Gpu, Machine
from zorse_megatron.kernels.bench_cases import CASES, Case, copy_case
from zorse_megatron.kernels.dispatch import why_not_triton
from zorse_megatron.launch.rank_environment import queue_environment, share_gpus
from zorse_megatron.measure.on_ranks.ranks import median_s
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.processes import num_processors
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.transport import connect, link_groups, world_options
from zorse_megatron.schedule.communicators import WORLD_CTAS, Communicator, planned_communicators

_TIMEOUT = timedelta(seconds=60)
_COPIED_BYTES = 256 * 10**6
_KERNEL_BYTES, _LAUNCHES = 512 * 10**6, 10
_KERNEL_S = 1e-3
"""What a kernel takes at least: several times what the host takes to launch the next one."""
_MOST_OF_MEMORY = 1 / 16


def machine() -> dict[str, Any]:
    """Every GPU that is visible, and what is installed."""
    found = found_software(0, 0, "here")
    seen = range(torch.cuda.device_count() if found.gpu is not None else 0)
    properties = map(torch.cuda.get_device_properties, seen)
    gpus = tuple(
        Gpu(name=gpu.name, capability=(gpu.major, gpu.minor), total_bytes=gpu.total_memory)
        for gpu in properties
    )
    here = Machine(
        gpus=gpus,
        torch=found.torch,
        nccl=found.nccl,
        transformer_engine=found.transformer_engine,
        driver=_driver() if gpus else None,
        num_processors=num_processors(),
        unusable_gpus=found.unusable_gpus,
    )
    return asdict(here)


def _driver() -> str | None:
    """Version of the GPUs' driver; None where nvidia-smi does not tell it."""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(words, text=True).splitlines()[0]
    return None


def kernels() -> dict[str, Any]:
    """Each kernel beside plain torch, and its speed beside that of a copy of as many bytes."""
    device = torch.device("cuda", 0)
    most = int(_MOST_OF_MEMORY * torch.cuda.get_device_properties(device).total_memory)
    num_bytes = max(_KERNEL_BYTES, min(most, int(_KERNEL_S * _copy_bytes_per_s(_KERNEL_BYTES))))
    copy_bytes_per_s = _copy_bytes_per_s(num_bytes)
    rows = []
    for make in CASES:
        case = make(num_bytes, device)
        bytes_per_s = case.num_bytes / _each_s(case.kernel, device)
        del case  # frees its tensors
        disagrees = _disagreement(make, device)
        rows.append({"share_of_copy": bytes_per_s / copy_bytes_per_s, "disagrees": disagrees})
    return {
        "in_plain_torch_because": why_not_triton(device),
        "num_bytes": num_bytes,
        "copy_bytes_per_s": copy_bytes_per_s,
        "kernels": {
            make.__name__.removesuffix("_case"): row for make, row in zip(CASES, rows, strict=True)
        },
    }


def _copy_bytes_per_s(num_bytes: int) -> float:
    """Read and written."""
    device = torch.device("cuda", 0)
    yardstick = copy_case(num_bytes, device)
    return yardstick.num_bytes / _each_s(yardstick.kernel, device)


def copies() -> float:
    """Bytes per second between pinned host memory and the GPU, of the slower direction."""
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    here = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    pairs = ((there, here), (here, there))
    return _COPIED_BYTES / max(
        _each_s(partial(target.copy_, source, non_blocking=True), there.device)
        for target, source in pairs
    )


def _disagreement(make: Callable[..., Case], device: torch.device) -> str | None:
    """How the kernel's result differs from plain torch's on equal tensors; None if it does not."""
    found = []
    for of_kernel in (True, False):
        torch.manual_seed(0)
        case = make(_KERNEL_BYTES, device)
        returned: Any = (case.kernel if of_kernel else next(iter(case.plain.values())))()
        found.append(case.written or (returned[0].float(),))
    try:
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    except AssertionError as error:
        return str(error)
    return None


def communicators(plan_file: str) -> list[dict[str, Any]]:
    """What each communicator of a plan takes on each of its ranks, as training makes them.

    One after another, with the free memory of the rank's GPU before and after each. Ranks that
    share a GPU see what all of them have taken. What they hold before is their CUDA contexts, each
    as large.
    """
    device, plan = _start(), load_plan(plan_file)
    in_host = dist.new_group(backend="gloo")
    dist.barrier(in_host)  # all that share the GPU have started CUDA
    rank, before_bytes = dist.get_rank(), _free_bytes(device)
    context_bytes = _context_bytes(device)
    dist.barrier(in_host)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size(), "the all-reduce gave a wrong sum"
    dist.barrier(in_host)
    taken = {planned_communicators(plan)[0]: before_bytes - _free_bytes(device)}
    channels = nccl_channels(plan)
    for communicator, connect_it in _connecting(plan, channels, device).items():
        taken[communicator] = _taken_bytes(connect_it, device)
    mine = [
        {
            "use": each.use,
            "ranks": each.ranks,
            "rank": rank,
            "num_bytes": num_bytes,
            "priced_bytes": communicator_bytes(each, rank, channels.get(each) or WORLD_CTAS),
        }
        for each, num_bytes in taken.items()
        if rank in each.ranks
    ]
    context: dict[str, Any] = {"use": "context", "ranks": (rank,), "rank": rank}
    context |= {"num_bytes": context_bytes, "priced_bytes": CONTEXT_BYTES}
    return [row for rows in gathered([context, *mine]) for row in rows]


def _context_bytes(device: torch.device) -> int:
    """A rank's part of what is in use on its GPU, which is shared with as many; 0 without one."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return (total_bytes - free_bytes) // -(-dist.get_world_size() // torch.cuda.device_count())


def _connecting(
    plan: Plan, channels: Mapping[Communicator, int], device: torch.device
) -> dict[Communicator, Callable[[], object]]:
    """Communicator -> what makes NCCL connect it; to be called by all ranks, in this order."""
    rank = dist.get_rank()
    groups = create_groups(plan, rank=rank, timeout=_TIMEOUT, channels=channels)
    group_of: dict[str, Any] = {"group": groups.group, "tp_group": groups.tp_group}
    if (regions := groups.regions) is not None:
        group_of |= {"region": regions.inside, "across": regions.across}
    _, *others = planned_communicators(plan)
    links = {each: (each.ranks[0], each.ranks[1]) for each in others if each.use == "link"}
    of_link = {link: channels[each] for each, link in links.items() if each in channels}
    mine = link_groups(list(links.values()), rank=rank, timeout=_TIMEOUT, channels=of_link)

    def connect_it(communicator: Communicator) -> None:
        if communicator.use == "link":
            connect(mine, all_links=[links[communicator]], rank=rank, device=device)
        elif rank in communicator.ranks:
            dist.all_reduce(torch.ones(1024, device=device), group=group_of[communicator.use])

    return {each: partial(connect_it, each) for each in others}


def _taken_bytes(act: Callable[[], object], device: torch.device) -> int:
    """How much less is free than before, with no other rank's doings in between."""
    dist.barrier()
    before_bytes = _free_bytes(device)
    dist.barrier()
    act()
    _wait_for(device)
    dist.barrier()
    return before_bytes - _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    """Of the rank's GPU; 0 without one."""
    _wait_for(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _start() -> torch.device:
    """Take this rank's GPU and connect nobody yet, with the queues that ranks of plans have."""
    os.environ.update(queue_environment(os.environ))
    share_gpus(os.environ)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
        torch.ones(1, device=device)
    backend = "nccl" if has_gpu else "gloo"
    options = world_options(backend, _TIMEOUT)
    dist.init_process_group(backend, timeout=_TIMEOUT, pg_options=options)
    return device


def _each_s(work: Callable[[], object], device: torch.device) -> float:
    """Of work that is launched several times, so that the launches do not count."""
    return median_s(lambda: [work() for _ in range(_LAUNCHES)], device) / _LAUNCHES


def _wait_for(device: torch.device) -> None:
    """Until the GPU has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Entry point."""
    check, path, *arguments = sys.argv[1:]
    checks = {each.__name__: each for each in (machine, communicators, kernels, copies)}
    answer = checks[check](*arguments)
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(answer), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
