"""How long one gather takes with nothing beside it: `... gather_main ANSWER.json BYTES`."""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from zorse_megatron.doctor.on_ranks.rank_start import start, wait_for

REPEATS = 10


def main() -> None:
    """Rank 0 writes seconds, the mean of ten."""
    device, size = start(), dist.get_world_size()
    shard = torch.zeros(int(sys.argv[2]) // size, dtype=torch.uint8, device=device)
    gathered = torch.empty(size * shard.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(gathered, shard)  # which connects
    wait_for(device)
    started_s = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_gather_into_tensor(gathered, shard)
    wait_for(device)
    if dist.get_rank() == 0:
        mean_s = (time.perf_counter() - started_s) / REPEATS
        Path(sys.argv[1]).write_text(json.dumps(mean_s))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
