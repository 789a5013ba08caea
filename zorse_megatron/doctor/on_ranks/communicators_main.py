"""Makes a plan's communicators as training does: `... communicators_main ANSWER.json PLAN.json`.

One after another, with the free memory of the rank's GPU before and after each. Ranks that share a
GPU see what all of them have taken.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.adapter.groups.process_groups import create_groups, nccl_channels
from zorse_megatron.doctor.connection import Taken
from zorse_megatron.doctor.on_ranks.rank_start import TIMEOUT, start, wait_for
from zorse_megatron.runtime.communicator_groups import connect, link_groups
from zorse_megatron.schedules.communicators import Communicator, planned_communicators
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan


def main() -> None:
    """Rank 0 writes what all ranks have noted."""
    device, plan = start(), load_plan(sys.argv[2])
    before_bytes = _free_bytes(device)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size(), "the all-reduce gave a wrong sum"
    found = {planned_communicators(plan)[0]: before_bytes - _free_bytes(device)}
    channels = nccl_channels(plan)
    for communicator, connect_it in _connecting(plan, channels, device).items():
        found[communicator] = _taken_bytes(connect_it, device)
    _write(Path(sys.argv[1]), found, channels)
    dist.destroy_process_group()


def _taken_bytes(act: Callable[[], object], device: torch.device) -> int:
    """How much less is free than before, with no other rank's doings in between."""
    dist.barrier()
    before_bytes = _free_bytes(device)
    dist.barrier()
    act()
    wait_for(device)
    dist.barrier()
    return before_bytes - _free_bytes(device)


def _write(
    answer: Path, found: Mapping[Communicator, int], channels: Mapping[Communicator, int]
) -> None:
    """Rank 0 writes what each rank has found of its communicators."""
    rank = dist.get_rank()
    mine = [
        Taken(
            use=each.use,
            ranks=each.ranks,
            rank=rank,
            channels=None if each.use == "world" else channels.get(each),
            num_bytes=num_bytes,
        )
        for each, num_bytes in found.items()
        if rank in each.ranks
    ]
    of_ranks: list[list[Taken]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    if rank == 0:
        answer.write_text(json.dumps([asdict(taken) for each in of_ranks for taken in each]))


def _connecting(
    plan: Plan, channels: Mapping[Communicator, int], device: torch.device
) -> dict[Communicator, Callable[[], object]]:
    """Communicator -> what makes NCCL connect it; to be called by all ranks, in this order."""
    rank = dist.get_rank()
    groups = create_groups(plan, rank=rank, timeout=TIMEOUT, channels=channels)
    group_of: dict[str, Any] = {"group": groups.group, "set": groups.set}
    if (regions := groups.regions) is not None:
        group_of |= {"region": regions.inside, "across": regions.across}
    _, *others = planned_communicators(plan)
    links = {each: (each.ranks[0], each.ranks[1]) for each in others if each.use == "link"}
    of_link = {link: channels[each] for each, link in links.items() if each in channels}
    mine = link_groups(list(links.values()), rank=rank, timeout=TIMEOUT, channels=of_link)

    def sum_up(communicator: Communicator) -> None:
        if rank in communicator.ranks:
            dist.all_reduce(torch.ones(1024, device=device), group=group_of[communicator.use])

    def send(communicator: Communicator) -> None:
        connect(mine, all_links=[links[communicator]], rank=rank, device=device)

    act: dict[str, Callable[[Communicator], None]] = dict.fromkeys(
        ("group", "region", "across", "set"), sum_up
    )
    act["link"] = send
    return {each: partial(act[each.use], each) for each in others}


def _free_bytes(device: torch.device) -> int:
    """Of the rank's GPU; 0 without one."""
    wait_for(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
