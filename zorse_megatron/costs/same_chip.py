"""Kinds of GPU with the same chip."""

import dataclasses
import math
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


def kinds_at_any_speed(kind: str, kinds: Mapping[str, GpuKind]) -> Iterator[str]:
    """Yield those of `equal_kinds`, and the well-known ones that are faster or slower in all alike.

    Such as a GPU that somebody has found to take 1.5 times as long as others of its kind.
    """
    yield from equal_kinds(kind, kinds)
    gpu = kinds.get(kind)
    for name, other in GPU_KINDS.items():
        if gpu is not None and name != kind and _is_in_proportion(gpu, other):
            yield name


def _is_in_proportion(gpu: GpuKind, other: GpuKind) -> bool:
    ratio = gpu.memory_bytes_per_s / other.memory_bytes_per_s
    ours, theirs = dataclasses.astuple(gpu.peak), dataclasses.astuple(other.peak)
    return all(
        mine is yours is None
        or (mine is not None and yours is not None and math.isclose(mine, ratio * yours))
        for mine, yours in zip(ours, theirs, strict=True)
    )
