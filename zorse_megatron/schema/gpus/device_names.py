"""From the name that a driver has for a device to a well-known kind of GPU.

The names are those of NVML's `nvmlDeviceGetName`, which `torch.cuda.get_device_name` returns too.
"""

import re
from functools import lru_cache

from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS, canonical_kind

GPU_KIND = "ZORSE_GPU_KIND"
"""Environment variable: the kind that a rank without a GPU stands for, to try things out."""

VENDOR = re.compile(r"\b(NVIDIA|AMD|Tesla|GeForce|Radeon|PRO)\s+", re.IGNORECASE)
"""The words of a driver's name that are not the model's."""
# What is left without the vendor's words -> kind. Whole names only: a slice of an A100 ("... MIG
# 3g.20gb") is another GPU than those of the data sheets.
_NAMES = (
    (r"H200", "H200"),
    (r"GH200 (480|96)GB( HBM3)?", "GH200-96"),
    (r"H100 80GB HBM3", "H100-80"),
    (r"H100 NVL", "H100-NVL"),
    (r"H100 PCIe", "H100-PCIE-80"),
    (r"A100-SXM4-80GB", "A100-80"),
    (r"A100-SXM4-40GB", "A100-40"),
    (r"A100 80GB PCIe", "A100-PCIE-80"),
    (r"A100-PCIE-40GB", "A100-PCIE-40"),
    (r"V100-SXM[23]-32GB(-LS)?", "V100-32"),
    (r"V100-SXM2-16GB", "V100-16"),
    (r"V100-PCIE-16GB", "V100-PCIE-16"),
    (r"V100-PCIE-32GB", "V100-PCIE-32"),
    (r"RTX 6000 Ada Generation", "RTX6000-Ada"),
    (r"P100-PCIE-16GB", "P100"),
)


@lru_cache(maxsize=1024)
def kind_of_device(name: str) -> str:
    """Return the well-known kind that a driver's name means; another name comes back as it is.

    >>> kind_of_device("NVIDIA A100-SXM4-40GB"), kind_of_device("Tesla T4")
    ('A100-40', 'T4')
    >>> kind_of_device("NVIDIA GeForce RTX 4090"), kind_of_device("NVIDIA B300")
    ('RTX4090', 'NVIDIA B300')
    """
    bare = VENDOR.sub("", name).strip()
    for pattern, kind in _NAMES:
        if re.fullmatch(pattern, bare, re.IGNORECASE):
            return kind
    kind = canonical_kind(bare)
    return kind if kind in GPU_KINDS else name
