"""All ranks' views of their devices and hosts."""

import torch

from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.measure.machine.devices import DeviceReader, SeenRank
from zorse_megatron.measure.machine.host import CpuReader, host_memory_bytes, nics
from zorse_megatron.measure.machine.nvml import NvmlReader, load_nvml
from zorse_megatron.measure.on_ranks.measuring_job import from_all


def seen_ranks(launched: LaunchedRank) -> list[SeenRank]:
    """Return what every rank sees. Collective. Raises MeasureError on a rank without a device."""
    on_node = sum(node == launched.node for node in from_all(launched.node))
    return from_all(
        SeenRank(
            rank=launched.rank,
            node=launched.node,
            local_rank=launched.local_rank,
            device=_reader().device(launched.local_rank, on_node),
            host_memory_bytes=host_memory_bytes(),
            nics=nics(),
        )
    )


def _reader() -> DeviceReader:
    if not torch.cuda.is_available():
        return CpuReader()
    count = torch.cuda.device_count()
    # CUDA numbers the GPUs as CUDA_VISIBLE_DEVICES says and NVML does not, so they go by uuid.
    uuids = tuple(f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(count))
    return NvmlReader(load_nvml(), uuids)
