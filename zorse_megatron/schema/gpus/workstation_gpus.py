"""GPUs of workstations and desktops. What the figures are: `data_sheet.py`."""

from zorse_megatron.schema.gpus.data_sheet import ampere_or_later, gpu
from zorse_megatron.schema.gpus.gpu import GpuKind

WORKSTATION_GPUS: tuple[GpuKind, ...] = (
    # Printed are 1,457 TFLOP/s in fp8 with sparsity: a quarter in 16 bits, an eighth in tf32.
    ampere_or_later(
        "RTX6000-Ada",
        memory_gb=48,
        memory_gb_per_s=960,
        fp16=364.2,
        tf32=182.1,
        fp32=91.1,
        pcie=4,
        source="NVIDIA RTX 6000 Ada Generation data sheet",
    ),
    ampere_or_later(
        "A6000",
        memory_gb=48,
        memory_gb_per_s=768,
        fp16=154.8,
        tf32=77.4,
        fp32=38.7,
        pcie=4,
        source="NVIDIA RTX A6000 data sheet",
    ),
    # Dense, with float32 sums; with float16 sums it is twice that.
    ampere_or_later(
        "RTX5090",
        memory_gb=32,
        memory_gb_per_s=1792,
        fp16=209.5,
        tf32=104.8,
        fp32=104.8,
        pcie=5,
        source="NVIDIA RTX Blackwell GPU architecture white paper",
    ),
    ampere_or_later(
        "RTX4090",
        memory_gb=24,
        memory_gb_per_s=1008,
        fp16=165.2,
        tf32=82.6,
        fp32=82.6,
        pcie=4,
        source="NVIDIA Ada GPU architecture white paper (float32 sums)",
    ),
    ampere_or_later(
        "RTX3090",
        memory_gb=24,
        memory_gb_per_s=936,
        fp16=71.0,
        tf32=35.6,
        fp32=35.6,
        pcie=4,
        source="NVIDIA Ampere GA102 white paper (float32 sums)",
    ),
    ampere_or_later(
        "RTX3080",
        memory_gb=10,
        memory_gb_per_s=760,
        fp16=59.5,
        tf32=29.8,
        fp32=29.8,
        pcie=4,
        source="NVIDIA Ampere GA102 white paper (float32 sums)",
    ),
    gpu(
        "W6800",
        memory_gb=32,
        memory_gb_per_s=512,
        fp16=35.7,
        fp32=17.8,
        pcie=4,
        source="AMD Radeon PRO W6800 data sheet",
    ),
)
