"""From the figures of data sheets to kinds of GPU, and what is behind these figures.

Bandwidth and peak rates are those of the vendors' data sheets; rates are dense (half of the figure
with sparsity). Memory is what CUDA gives a program, where somebody reported it (`on_device.py`),
and the advertised size in decimal GB elsewhere. `source` names the document, by its title; figures
that none of NVIDIA's was found for are `unconfirmed`. A test compares what is printed, and rates
with units x clock x operations a cycle.

Link rates are what transfers reach, not what is printed on the box. Measured where a public figure
exists (Sailor, SOSP 2025: A100 243 GB/s, V100 68 GB/s, GH200 250 GB/s with four GPUs sharing; the
Zorse paper's clusters, MLSys 2026: A10G about 10 GB/s, T4 about 6 GB/s over PCIe); otherwise 0.8 of
the published NVLink rate of one direction, as the A100 reaches. Host links reach about 0.75 of
PCIe x16: 12, 24 and 48 GB/s for generations 3, 4 and 5.

A kind without a rate for a type has no units for it. NVIDIA's have bfloat16 from compute capability
8.0 on, Ampere (Transformer Engine's documentation, "Datatype and hardware support matrix"; for 7.5,
the T4, TensorRT's support matrix has float16 but no bfloat16), and tensor cores for float16 from
7.0 on (V100 and T4 data sheets). The W6800's data sheet has a rate for float16, none for bfloat16.
"""

from zorse_megatron.schema.gpus.compute_capability import CAPABILITIES
from zorse_megatron.schema.gpus.gpu import GpuKind, LinkType, PeakFlops
from zorse_megatron.schema.gpus.on_device import ON_DEVICE

_GB = 10**9
_MIB = 2**20
_TERA = 1e12
_HOST_LINK_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
# What one GPU reaches over PCIe to another one: root complexes halve the way through the host.
_PCIE_PEER_BYTES_PER_S = {3: 6e9, 4: 10e9, 5: 20e9}


def gpu(
    name: str,
    *,
    memory_gb: int,
    memory_gb_per_s: float,
    fp16: float | None,
    fp32: float,
    tf32: float | None = None,
    bf16: float | None = None,
    link: tuple[LinkType, float] | None = None,
    pcie: int,
    source: str,
    unconfirmed: tuple[str, ...] = (),
) -> GpuKind:
    """Make a kind from figures as data sheets print them: GB, GB/s, TFLOP/s."""
    link_type, link_gb_per_s = link or ("pcie", _PCIE_PEER_BYTES_PER_S[pcie] / 1e9)
    seen = ON_DEVICE.get(name)
    reported = seen.memory_mib if seen is not None else None
    return GpuKind(
        name=name,
        memory_bytes=memory_gb * _GB if reported is None else int(reported * _MIB),
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        peak=PeakFlops(
            float32_flops_per_s=fp32 * _TERA,
            float16_flops_per_s=fp16 and fp16 * _TERA,
            bfloat16_flops_per_s=bf16 and bf16 * _TERA,
            tf32_flops_per_s=tf32 and tf32 * _TERA,
        ),
        link_type=link_type,
        link_bytes_per_s=link_gb_per_s * 1e9,
        host_link_bytes_per_s=_HOST_LINK_BYTES_PER_S[pcie],
        source=source,
        unconfirmed=unconfirmed,
        advertised_gb=memory_gb,
        memory_source=seen.source if seen is not None and reported is not None else None,
        capability=CAPABILITIES.get(name),
        multiprocessors=seen.multiprocessors if seen is not None else None,
    )


def ampere_or_later(name: str, *, fp16: float, **figures: object) -> GpuKind:
    """Make a kind whose bfloat16 rate is its float16 rate."""
    return gpu(name, fp16=fp16, bf16=fp16, **figures)  # type: ignore[arg-type]
