"""Well-known kinds of GPU and cloud instances, and the names that they go by.

Host links reach about 0.75 of PCIe x16: 12, 24 and 48 GB/s for generations 3, 4 and 5. Another GPU
is reached at half of that or less, as root complexes halve the way through the host (the Zorse
paper's clusters, MLSys 2026: A10G about 10 GB/s, T4 about 6 GB/s). Fewer lanes reach their share.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.files.quantities import spell_bandwidth
from zorse_megatron.files.wording import did_you_mean
from zorse_megatron.files.yaml_text import read_table
from zorse_megatron.gpus.gpu import BF16_FROM, Capability, GpuKind, PeakFlops

_GB, _MIB, _TERA = 10**9, 2**20, 1e12
_HOST_LINK_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
_PCIE_PEER_BYTES_PER_S = {3: 6e9, 4: 10e9, 5: 20e9}
_ALL_LANES = 16


def _kind(name: str, entry: dict[str, Any]) -> GpuKind:
    """Make a kind of an entry, whose keys the file describes."""
    figures, chip = entry["figures"], entry["chip"]
    capability = tuple(chip["capability"]) if "capability" in chip else None
    has_bf16 = capability is not None and capability >= BF16_FROM
    tf32, cuda_mib = figures.get("tf32"), entry.get("cuda_mib")
    lanes = chip.get("lanes", _ALL_LANES) / _ALL_LANES
    peer_bytes_per_s = lanes * _PCIE_PEER_BYTES_PER_S[chip["pcie"]]
    link_type, link_gb_per_s = chip.get("link", ("pcie", peer_bytes_per_s / _GB))
    return GpuKind(
        name=name,
        like=name,
        memory_bytes=int(figures["memory_gb"] * _GB if cuda_mib is None else cuda_mib * _MIB),
        memory_bytes_per_s=figures["memory_gb_per_s"] * 1e9,
        peak=PeakFlops(
            float32_flops_per_s=figures["fp32"] * _TERA,
            float16_flops_per_s=figures["fp16"] * _TERA,
            bfloat16_flops_per_s=figures["fp16"] * _TERA if has_bf16 else None,
            tf32_flops_per_s=tf32 and tf32 * _TERA,
        ),
        link_type=link_type,
        link_bytes_per_s=link_gb_per_s * 1e9,
        host_link_bytes_per_s=lanes * _HOST_LINK_BYTES_PER_S[chip["pcie"]],
        source=entry["source"],
        unconfirmed=tuple(entry.get("unconfirmed", ())),
        advertised_gb=figures["memory_gb"],
        memory_source=entry.get("cuda_source"),
        capability=capability,
        multiprocessors=chip.get("multiprocessors"),
    )


def squeezed(name: str) -> str:
    """Return a name without what spellings differ in."""
    return "".join(sign for sign in name.lower() if sign.isalnum())


_ENTRIES = read_table(__package__, "gpus.yaml")

GPU_KINDS: dict[str, GpuKind] = {name: _kind(name, entry) for name, entry in _ENTRIES.items()}

CAPABILITIES: dict[str, Capability] = {
    name: kind.capability for name, kind in GPU_KINDS.items() if kind.capability is not None
}
"""Kind -> its compute capability; kinds of other vendors have none."""

_BY_SPELLING: dict[str, list[str]] = defaultdict(list)
for _name, _entry in _ENTRIES.items():
    for _spelling in {squeezed(each) for each in (_name, *_entry.get("also", ()))}:
        _BY_SPELLING[_spelling].append(_name)


@lru_cache(maxsize=1024)  # a file may name one kind in thousands of nodes
def canonical_kind(name: str) -> str:
    """Return our spelling of a well-known kind; an unknown name comes back as it is.

    >>> canonical_kind("a100x40"), canonical_kind("rtx 4090"), canonical_kind("Z1")
    ('A100-40', 'RTX4090', 'Z1')
    """
    known = kinds_called(name)
    return known[0].name if len(known) == 1 else name


def kinds_called(name: str) -> tuple[GpuKind, ...]:
    """Return the kinds that have this name, in any spelling; several differ in memory alone.

    >>> [kind.name for kind in kinds_called("rtx 4060 ti")]
    ['RTX4060Ti-16', 'RTX4060Ti-8']
    """
    return tuple(GPU_KINDS[kind] for kind in _BY_SPELLING.get(squeezed(name), ()))


# GPU names that a cluster file may not use: ambiguous ones, and unsupported vendors.


# What a name may have after the model's that does not say which memory: "A100 SXM4", "V100 PCIe".
_FORM = re.compile(r"(sxm\d?|pcie|nvlink)$")
# Chips, clocks and memory of their own, under the numbers of desktop cards.
_LAPTOP = re.compile(r"laptop|mobile|notebook|max-?q|\d{4}m$", re.IGNORECASE)
# What others than NVIDIA call their accelerators: AMD, Intel, Google, AWS, Huawei, Apple.
_FOREIGN = re.compile(
    r"AMD|Instinct|Radeon|MI\d{2,3}|RX ?\d{4}|W[5-7]\d00\b"
    r"|Intel|Gaudi|Habana|Ponte ?Vecchio|Max ?1\d{3}\b"
    r"|(Google )?(Cloud )?TPU|(AWS )?(Trainium|Inferentia|trn\d|inf\d)"
    r"|(Huawei )?Ascend|Apple|M[1-5]( (Pro|Max|Ultra))?$",
    re.IGNORECASE,
)


def is_foreign(name: str) -> bool:
    """Whether it names an accelerator that plans cannot be trained on, well known or not.

    >>> is_foreign("MI300X"), is_foreign("AMD Radeon PRO W6800"), is_foreign("T4")
    (True, True, False)
    """
    return _FOREIGN.match(name.strip()) is not None


def variants(name: str) -> tuple[GpuKind, ...]:
    """Return the well-known kinds of a model whose name does not say which.

    >>> [kind.name for kind in variants("Tesla V100 PCIe")]
    ['V100-PCIE-32', 'V100-PCIE-16']
    >>> [kind.name for kind in variants("A100 SXM4")], variants("T4"), variants("Z1")
    (['A100-80', 'A100-40'], (), ())
    """
    spelled = squeezed(VENDOR.sub("", name))
    form = _FORM.search(spelled)
    model = _FORM.sub("", spelled)
    kinds = [
        kind
        for kind in GPU_KINDS.values()
        if "-" in kind.name and squeezed(kind.name.partition("-")[0]) == model
    ]
    is_pcie = form is not None and form[1] == "pcie"
    fitting = [kind for kind in kinds if form is None or (kind.link_type == "pcie") == is_pcie]
    return tuple(fitting or kinds)


def unknown_kind(name: str, where: str, known: Iterable[str], *, expected: str) -> Problem:
    """Say what is wrong with a name that is none of `known`, and what may have been meant."""
    if is_foreign(name):
        return Problem(
            where=where,
            found=f'"{name}", which is not of NVIDIA',
            expected="GPUs of NVIDIA",
            remedy="Plans are trained over CUDA and NCCL; nothing here was run on ROCm, oneAPI or "
            "XLA. Leave it out; or, only to plan, describe it under gpu_kinds.",
        )
    if _LAPTOP.search(name):
        return Problem(
            where=where,
            found=f'"{name}", a GPU of a laptop',
            expected=expected,
            remedy="Laptops have other chips than the desktop cards of the same number: run zorse "
            "profile measure there, which says what to write under gpu_kinds.",
        )
    several = variants(name)
    if several:
        return Problem(
            where=where,
            found=f'"{name}", which does not say which one',
            expected=f"one of {', '.join(map(_described, several))}",
            remedy="Say which one; nvidia-smi shows name and memory.",
        )
    return Problem(
        where=where,
        found=f'"{name}", which is not a known kind of GPU',
        expected=expected,
        remedy=did_you_mean(name, known) + " Or describe it under gpu_kinds.",
    )


def _described(kind: GpuKind) -> str:
    memory = f"{kind.advertised_gb} GB at {spell_bandwidth(kind.memory_bytes_per_s)}"
    return f"{kind.name} ({memory}, {kind.link_type})"


# From the name that a driver has for a device to a well-known kind of GPU.
#
# The names are those of NVML's `nvmlDeviceGetName`, which `torch.cuda.get_device_name` returns too.


GPU_KIND = "ZORSE_GPU_KIND"
"""Environment variable: the kind that a rank without a GPU stands for, to try things out."""

VENDOR = re.compile(r"\b(NVIDIA|AMD|Tesla|GeForce|Radeon|PRO)\s+", re.IGNORECASE)
"""The words of a driver's name that are not the model's."""


def kind_of_device(name: str, memory_bytes: int | None = None) -> str:
    """Return the well-known kind that a driver's name means; another name comes back as it is.

    Whole names only: a slice of an A100 ("... MIG 3g.20gb") is another GPU than those of the data
    sheets. `memory_bytes`: of the device, which tells cards apart that drivers call the same.

    >>> kind_of_device("NVIDIA A100-SXM4-40GB"), kind_of_device("Tesla T4")
    ('A100-40', 'T4')
    >>> kind_of_device("NVIDIA GeForce RTX 4090"), kind_of_device("NVIDIA B300")
    ('RTX4090', 'NVIDIA B300')
    >>> kind_of_device("NVIDIA GeForce RTX 4060 Ti", 16_700_000_000)
    'RTX4060Ti-16'
    """
    called = kinds_called(VENDOR.sub("", name).strip())
    if len(called) > 1 and memory_bytes is not None:
        return min(called, key=lambda kind: abs(kind.memory_bytes - memory_bytes)).name
    return called[0].name if len(called) == 1 else name


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A kind of machine that can be rented."""

    gpu_kind: str
    gpu_count: int
    nic_count: int
    nic_bytes_per_s: float
    """Bandwidth of one adapter."""
    host_memory_bytes: int


INSTANCES: dict[str, Instance] = {
    name: Instance(
        gpu_kind=entry["gpu"],
        gpu_count=entry["count"],
        nic_count=entry["nics"],
        nic_bytes_per_s=entry["nic_gbit_per_s"] * 1e9 / 8,
        host_memory_bytes=entry["host_gib"] * 2**30,
    )
    for name, entry in read_table(__package__, "instances.yaml").items()
}
