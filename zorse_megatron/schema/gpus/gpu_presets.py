"""Well-known kinds of GPU, and how they are spelled."""

from functools import lru_cache

from zorse_megatron.schema.gpus.data_centre_gpus import DATA_CENTRE_GPUS
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.gpus.workstation_gpus import WORKSTATION_GPUS

GPU_KINDS: dict[str, GpuKind] = {kind.name: kind for kind in DATA_CENTRE_GPUS + WORKSTATION_GPUS}

# Spellings of published data sets and of cloud providers.
_ALIASES = {
    "a100x40": "A100-40",
    "a100x80": "A100-80",
    "gh-96": "GH200-96",
    "gh200": "GH200-96",
    "h100-sxm": "H100-80",
    "h100-pcie": "H100-PCIE-80",
    "rtx6000adageneration": "RTX6000-Ada",
    "v100x16": "V100-16",
    "v100x32": "V100-32",
    "v100-pciex16": "V100-PCIE-16",
    "rtxa6000": "A6000",
}


@lru_cache(maxsize=1024)  # a file may name one kind in thousands of nodes
def canonical_kind(name: str) -> str:
    """Return our spelling of a well-known kind; an unknown name comes back as it is.

    >>> canonical_kind("a100x40"), canonical_kind("rtx 4090"), canonical_kind("Z1")
    ('A100-40', 'RTX4090', 'Z1')
    """
    spelled = squeezed(name)
    by_spelling = {squeezed(known): known for known in GPU_KINDS}
    by_spelling |= {squeezed(alias): known for alias, known in _ALIASES.items()}
    return by_spelling.get(spelled, name)


def squeezed(name: str) -> str:
    """Return a name without what spellings differ in."""
    return "".join(sign for sign in name.lower() if sign.isalnum())
