"""How the ranks of a check that is no training begin: their GPU, and NCCL; gloo without a GPU."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from zorse_megatron.adapter.found_software import gpu_of
from zorse_megatron.launch.shared_gpus import share_gpus
from zorse_megatron.runtime.communicator_groups import world_options

TIMEOUT = timedelta(seconds=60)


def start() -> torch.device:
    """Take this rank's GPU, connect nobody yet."""
    share_gpus(os.environ)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", gpu_of(int(os.environ["LOCAL_RANK"])))
        torch.cuda.set_device(device)
        torch.ones(1, device=device)
    backend = "nccl" if has_gpu else "gloo"
    options = world_options(backend, TIMEOUT)
    dist.init_process_group(backend, timeout=TIMEOUT, pg_options=options)
    return device


def wait_for(device: torch.device) -> None:
    """Until the GPU has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
