"""Well-known kinds of GPU, as `gpus.yaml` has them, and how they are spelled.

Host links reach about 0.75 of PCIe x16: 12, 24 and 48 GB/s for generations 3, 4 and 5. Another GPU
is reached at half of that or less, as root complexes halve the way through the host (the Zorse
paper's clusters, MLSys 2026: A10G about 10 GB/s, T4 about 6 GB/s). Fewer lanes reach their share.
"""

from collections import defaultdict
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from zorse_megatron.schema.gpus.compute_capability import BF16_FROM, Capability
from zorse_megatron.schema.gpus.gpu import GpuKind, PeakFlops

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


_TEXT = files(__package__).joinpath("gpus.yaml").read_text(encoding="utf-8")
# libyaml, where PyYAML was built with it, takes a tenth of the time.
_ENTRIES = yaml.load(_TEXT, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))

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
