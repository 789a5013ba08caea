"""Makes communicators one by one and notes the free memory: `... communicators_main ANSWER.json`.

The kinds are those of a plan: world, one per direction of a pair, one for a group's collectives.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zorse_megatron.adapter.found_software import gpu_of
from zorse_megatron.launch.shared_gpus import share_gpus

_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Rank 0 writes (name, bytes less than before) of each step."""
    share_gpus(os.environ)
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(gpu_of(int(os.environ["LOCAL_RANK"])))
    one = torch.ones(1024, device="cuda")
    dist.init_process_group("nccl", timeout=_TIMEOUT)
    notes: list[tuple[str, int]] = []

    def note(name: str, act: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        before_bytes, _ = torch.cuda.mem_get_info()
        act()
        torch.cuda.synchronize()
        notes.append((name, before_bytes - torch.cuda.mem_get_info()[0]))

    note("world", lambda: dist.all_reduce(one))
    assert one.eq(dist.get_world_size()).all(), "the all-reduce gave a wrong sum"
    for name, source, target in (("pair, one way", 0, 1), ("pair, the other way", 1, 0)):
        pair = dist.new_group([0, 1], timeout=_TIMEOUT)
        note(name, lambda: _send(one, source, target, pair))  # noqa: B023  (called at once)
    group = dist.new_group(list(range(dist.get_world_size())), timeout=_TIMEOUT)
    gathered = torch.empty(1024 * dist.get_world_size(), device="cuda")
    note("group", lambda: dist.all_gather_into_tensor(gathered, one, group=group))
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(notes))
    dist.destroy_process_group()


def _send(tensor: torch.Tensor, source: int, target: int, group: dist.ProcessGroup) -> None:
    if dist.get_rank() == source:
        dist.send(tensor, target, group=group)
    elif dist.get_rank() == target:
        dist.recv(tensor, source, group=group)


if __name__ == "__main__":
    main()
