"""Well-known kinds of GPU.

Memory, bandwidth and peak rates are those of the vendors' data sheets; rates are dense (half of
the figure with sparsity). Memory is the advertised size in decimal GB, which is always a little
below what the driver reports: an A100 of "40 GB" reports 40,960 MiB = 42.9 GB.

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

from zorse_megatron.schema.gpu import GpuKind, LinkType, PeakFlops

_GB = 10**9
_TERA = 1e12
_HOST_LINK_BYTES_PER_S = {3: 12e9, 4: 24e9, 5: 48e9}
# What one GPU reaches over PCIe to another one: root complexes halve the way through the host.
_PCIE_PEER_BYTES_PER_S = {3: 6e9, 4: 10e9, 5: 20e9}


def _gpu(
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
) -> GpuKind:
    """Make a kind from figures as data sheets print them: GB, GB/s, TFLOP/s."""
    link_type, link_gb_per_s = link or ("pcie", _PCIE_PEER_BYTES_PER_S[pcie] / 1e9)
    return GpuKind(
        name=name,
        memory_bytes=memory_gb * _GB,
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
    )


def _ampere_or_later(name: str, *, fp16: float, **figures: object) -> GpuKind:
    """Make a kind whose bfloat16 rate is its float16 rate."""
    return _gpu(name, fp16=fp16, bf16=fp16, **figures)  # type: ignore[arg-type]


GPU_KINDS: dict[str, GpuKind] = {
    kind.name: kind
    for kind in (
        _ampere_or_later(
            "H200",
            memory_gb=141,
            memory_gb_per_s=4800,
            fp16=989.5,
            tf32=494.7,
            fp32=67.0,
            link=("nvswitch", 360),
            pcie=5,
            source="NVIDIA H200 data sheet (SXM)",
        ),
        _ampere_or_later(
            "GH200-96",
            memory_gb=96,
            memory_gb_per_s=4000,
            fp16=989.5,
            tf32=494.7,
            fp32=67.0,
            link=("nvlink", 250),
            pcie=5,
            source="NVIDIA GH200 Grace Hopper data sheet (96 GB HBM3)",
        ),
        _ampere_or_later(
            "H100-80",
            memory_gb=80,
            memory_gb_per_s=3350,
            fp16=989.5,
            tf32=494.7,
            fp32=67.0,
            link=("nvswitch", 360),
            pcie=5,
            source="NVIDIA H100 data sheet (SXM)",
        ),
        _ampere_or_later(
            "H100-NVL",
            memory_gb=94,
            memory_gb_per_s=3900,
            fp16=835.5,
            tf32=417.5,
            fp32=60.0,
            link=("nvlink", 240),
            pcie=5,
            source="NVIDIA H100 data sheet (NVL)",
        ),
        _ampere_or_later(
            "A100-80",
            memory_gb=80,
            memory_gb_per_s=2039,
            fp16=312.0,
            tf32=156.0,
            fp32=19.5,
            link=("nvswitch", 243),
            pcie=4,
            source="NVIDIA A100 data sheet (80 GB SXM)",
        ),
        _ampere_or_later(
            "A100-40",
            memory_gb=40,
            memory_gb_per_s=1555,
            fp16=312.0,
            tf32=156.0,
            fp32=19.5,
            link=("nvswitch", 243),
            pcie=4,
            source="NVIDIA A100 data sheet (40 GB SXM)",
        ),
        _ampere_or_later(
            "L40S",
            memory_gb=48,
            memory_gb_per_s=864,
            fp16=362.0,
            tf32=183.0,
            fp32=91.6,
            pcie=4,
            source="NVIDIA L40S data sheet",
        ),
        _ampere_or_later(
            "A6000",
            memory_gb=48,
            memory_gb_per_s=768,
            fp16=154.8,
            tf32=77.4,
            fp32=38.7,
            pcie=4,
            source="NVIDIA RTX A6000 data sheet",
        ),
        _ampere_or_later(
            "A10G",
            memory_gb=24,
            memory_gb_per_s=600,
            fp16=70.0,
            tf32=35.0,
            fp32=35.0,
            pcie=4,
            source="NVIDIA A10G data sheet",
        ),
        _ampere_or_later(
            "L4",
            memory_gb=24,
            memory_gb_per_s=300,
            fp16=121.0,
            tf32=60.0,
            fp32=30.3,
            pcie=4,
            source="NVIDIA L4 data sheet",
        ),
        _ampere_or_later(
            "RTX4090",
            memory_gb=24,
            memory_gb_per_s=1008,
            fp16=165.2,
            tf32=82.6,
            fp32=82.6,
            pcie=4,
            source="NVIDIA Ada GPU architecture white paper (float32 sums)",
        ),
        _ampere_or_later(
            "RTX3090",
            memory_gb=24,
            memory_gb_per_s=936,
            fp16=71.0,
            tf32=35.6,
            fp32=35.6,
            pcie=4,
            source="NVIDIA Ampere GA102 white paper (float32 sums)",
        ),
        _ampere_or_later(
            "RTX3080",
            memory_gb=10,
            memory_gb_per_s=760,
            fp16=59.5,
            tf32=29.8,
            fp32=29.8,
            pcie=4,
            source="NVIDIA Ampere GA102 white paper (float32 sums)",
        ),
        _gpu(
            "V100-32",
            memory_gb=32,
            memory_gb_per_s=900,
            fp16=125.0,
            fp32=15.7,
            link=("nvlink", 68),
            pcie=3,
            source="NVIDIA V100 data sheet (32 GB SXM2)",
        ),
        _gpu(
            "V100-16",
            memory_gb=16,
            memory_gb_per_s=900,
            fp16=125.0,
            fp32=15.7,
            link=("nvlink", 68),
            pcie=3,
            source="NVIDIA V100 data sheet (16 GB SXM2)",
        ),
        _gpu(
            "V100-PCIE-16",
            memory_gb=16,
            memory_gb_per_s=900,
            fp16=112.0,
            fp32=14.0,
            pcie=3,
            source="NVIDIA V100 data sheet (16 GB PCIe)",
        ),
        _gpu(
            "T4",
            memory_gb=16,
            memory_gb_per_s=320,
            fp16=65.0,
            fp32=8.1,
            pcie=3,
            source="NVIDIA T4 data sheet",
        ),
        # No tensor cores: float16 runs at twice the float32 rate.
        _gpu(
            "P100",
            memory_gb=16,
            memory_gb_per_s=732,
            fp16=18.7,
            fp32=9.3,
            pcie=3,
            source="NVIDIA P100 data sheet (16 GB PCIe)",
        ),
        # float16 is stored only: the P40 computes it in float32.
        _gpu(
            "P40",
            memory_gb=24,
            memory_gb_per_s=346,
            fp16=12.0,
            fp32=12.0,
            pcie=3,
            source="NVIDIA P40 data sheet",
        ),
        _gpu(
            "W6800",
            memory_gb=32,
            memory_gb_per_s=512,
            fp16=35.7,
            fp32=17.8,
            pcie=4,
            source="AMD Radeon PRO W6800 data sheet",
        ),
    )
}

# Spellings of published data sets and of cloud providers.
_ALIASES = {
    "a100x40": "A100-40",
    "a100x80": "A100-80",
    "gh-96": "GH200-96",
    "gh200": "GH200-96",
    "h100-sxm": "H100-80",
    "v100x16": "V100-16",
    "v100x32": "V100-32",
    "v100-pciex16": "V100-PCIE-16",
    "rtxa6000": "A6000",
}


def canonical_kind(name: str) -> str:
    """Return our spelling of a well-known kind; an unknown name comes back as it is.

    >>> canonical_kind("a100x40"), canonical_kind("rtx 4090"), canonical_kind("Z1")
    ('A100-40', 'RTX4090', 'Z1')
    """
    spelled = _squeezed(name)
    by_spelling = {_squeezed(known): known for known in GPU_KINDS}
    by_spelling |= {_squeezed(alias): known for alias, known in _ALIASES.items()}
    return by_spelling.get(spelled, name)


def _squeezed(name: str) -> str:
    return "".join(sign for sign in name.lower() if sign.isalnum())
