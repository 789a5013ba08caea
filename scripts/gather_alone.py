"""How long one gather takes with nothing beside it; started by `bench_offload_gpu.py`.

    torchrun --nproc-per-node 2 scripts/gather_alone.py --bytes 100000000

Prints seconds, the mean of ten.
"""

import argparse
import os
import time

REPEATS = 10


def measure(num_bytes: int) -> None:
    """Run on each rank; rank 0 prints."""
    import torch
    import torch.distributed as dist

    from zorse_megatron.adapter.found_software import gpu_of

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
    shard = torch.zeros(num_bytes // dist.get_world_size(), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    started_s = 0.0
    for repeat in range(REPEATS + 1):
        if repeat == 1:  # the first one warms up
            started_s = _now_s(on_gpu)
        dist.all_gather(parts, shard)
    if dist.get_rank() == 0:
        print((_now_s(on_gpu) - started_s) / REPEATS)
    dist.destroy_process_group()


def _now_s(on_gpu: bool) -> float:
    if on_gpu:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Read the size and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, required=True, help="size of the gathered buffer")
    measure(parser.parse_args().bytes)


if __name__ == "__main__":
    main()
