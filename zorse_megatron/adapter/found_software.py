"""Asks torch and the installation what a rank's `RankSoftware` is; imports neither Megatron nor
Transformer Engine, which take seconds and may fail where they do not fit the GPU."""

import importlib.util
import os
from importlib import metadata

import torch

from zorse_megatron.software.machine_flags import EXTENSIONS
from zorse_megatron.software.rank_software import RankSoftware, SeenGpu


def gpu_of(local_rank: int) -> int:
    """Number of the GPU that a rank takes, among those that its process sees.

    A launcher may show each task its own GPU alone: then it is number 0, whatever the local rank.
    """
    return local_rank % torch.cuda.device_count()


def take_gpu() -> None:
    """Let this process compute on the GPU of its rank, if there is one."""
    if torch.cuda.device_count():
        torch.cuda.set_device(gpu_of(int(os.environ.get("LOCAL_RANK", "0"))))


def found_software(rank: int, local_rank: int, node: str) -> RankSoftware:
    """Look at this process's GPU and at what is installed."""
    gpu = _gpu(gpu_of(local_rank)) if torch.cuda.device_count() else None
    return RankSoftware(
        rank=rank,
        node=node,
        gpu=gpu,
        torch=torch.__version__,
        archs=tuple(torch.cuda.get_arch_list()) if gpu else (),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        transformer_engine=_version("transformer-engine", "transformer_engine"),
        flash_attention=_version("flash-attn", "flash_attn"),
        extensions=tuple(name for name in EXTENSIONS if _is_there(name)),
        host_id=os.environ.get("NCCL_HOSTID"),
    )


def _gpu(number: int) -> SeenGpu:
    properties = torch.cuda.get_device_properties(number)
    return SeenGpu(
        name=properties.name,
        uuid=f"GPU-{properties.uuid}",
        capability=(properties.major, properties.minor),
    )


def _version(distribution: str, module: str) -> str | None:
    """The installed version; None where the module cannot be found."""
    if not _is_there(module):
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # its parent does not load, for whatever reason
        return False
