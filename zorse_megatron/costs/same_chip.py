"""Kinds of GPU with the same chip."""

from collections.abc import Iterator, Mapping

from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS


def equal_kinds(kind: str, kinds: Mapping[str, GpuKind]) -> Iterator[str]:
    """Yield the kind, and those with the same figures but for memory size and links.

    Among them are the well-known ones: what a cluster file makes of an A100 by giving it less
    memory still computes as an A100.
    """
    yield kind
    gpu = kinds.get(kind)
    for name, other in {**GPU_KINDS, **kinds}.items():
        if gpu is not None and name != kind:
            same_bandwidth = other.memory_bytes_per_s == gpu.memory_bytes_per_s
            if same_bandwidth and other.peak == gpu.peak:
                yield name
