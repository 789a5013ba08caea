"""A device's rates: matrix products, memory copies, host link."""

import torch

from zorse_megatron.measure.machine.devices import SeenDevice
from zorse_megatron.measure.on_ranks.clock import median_s
from zorse_megatron.measure.results.cluster_text import MeasuredKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.text.quantities import COMPUTE_RATE

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Large enough to fill the device, small enough for some seconds in all.
_GPU_WIDTH, _CPU_WIDTH = 8192, 512
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
