"""Well-known cloud instances: their GPUs, network and host memory.

From the providers' pages (AWS "Amazon EC2 instance types", Google Cloud "GPU machine types", Azure
"ND-series"). Network figures are those of the provider and count all adapters of the instance.
"""

from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A kind of machine that can be rented."""

    gpu_kind: str
    gpu_count: int
    nic_count: int
    nic_bytes_per_s: float
    """Bandwidth of one adapter."""
    host_memory_bytes: int


def _instance(gpu_kind: str, gpu_count: int, nics: tuple[int, float], host_gib: int) -> Instance:
    """Make an instance; `nics` is (count, Gb/s of each)."""
    return Instance(
        gpu_kind=gpu_kind,
        gpu_count=gpu_count,
        nic_count=nics[0],
        nic_bytes_per_s=nics[1] * 1e9 / 8,
        host_memory_bytes=host_gib * _GIB,
    )


INSTANCES: dict[str, Instance] = {
    # Amazon Web Services
    "p5en.48xlarge": _instance("H200", 8, (16, 200), 2048),
    "p5e.48xlarge": _instance("H200", 8, (32, 100), 2048),
    "p5.48xlarge": _instance("H100-80", 8, (32, 100), 2048),
    "p4de.24xlarge": _instance("A100-80", 8, (4, 100), 1152),
    "p4d.24xlarge": _instance("A100-40", 8, (4, 100), 1152),
    "p3dn.24xlarge": _instance("V100-32", 8, (1, 100), 768),
    "p3.16xlarge": _instance("V100-16", 8, (1, 25), 488),
    "p3.8xlarge": _instance("V100-16", 4, (1, 10), 244),
    "g6.48xlarge": _instance("L4", 8, (1, 100), 768),
    "g6.12xlarge": _instance("L4", 4, (1, 40), 192),
    "g5.48xlarge": _instance("A10G", 8, (1, 100), 768),
    "g5.24xlarge": _instance("A10G", 4, (1, 50), 384),
    "g5.12xlarge": _instance("A10G", 4, (1, 40), 192),
    "g4dn.metal": _instance("T4", 8, (1, 100), 384),
    "g4dn.12xlarge": _instance("T4", 4, (1, 50), 192),
    # Google Cloud
    "a3-highgpu-8g": _instance("H100-80", 8, (4, 200), 1872),
    "a2-highgpu-8g": _instance("A100-40", 8, (1, 100), 680),
    "a2-ultragpu-8g": _instance("A100-80", 8, (1, 100), 1360),
    "g2-standard-96": _instance("L4", 8, (1, 100), 384),
    # Microsoft Azure
    "ND96isr_H100_v5": _instance("H100-80", 8, (8, 400), 1900),
    "ND96amsr_A100_v4": _instance("A100-80", 8, (8, 200), 1900),
    "ND96asr_A100_v4": _instance("A100-40", 8, (8, 200), 900),
}
