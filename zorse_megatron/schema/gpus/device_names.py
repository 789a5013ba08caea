"""From the name that a driver has for a device to a well-known kind of GPU.

The names are those of NVML's `nvmlDeviceGetName`, which `torch.cuda.get_device_name` returns too.
"""

import re

from zorse_megatron.schema.gpus.gpu_presets import kinds_called

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
