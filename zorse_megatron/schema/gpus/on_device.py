"""What CUDA says of each well-known kind of GPU once it is there: memory and processors.

A data sheet prints memory in decimal GB; a driver gives programs another number, more for most
kinds and less for some (a T4 of "16 GB", 16.0e9 bytes, has 15.6e9), as firmware, page tables and
ECC take their part first. `memory_mib` is `total_memory` of `torch.cuda.get_device_properties`,
which an out-of-memory message calls "total capacity": the smallest of those found in public reports
of current drivers, which differ by up to 0.3 GiB. Kinds without a report count as the advertised
size.

Multiprocessors are those of NVIDIA's white papers and data sheets.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class OnDevice:
    """One kind, as CUDA describes it."""

    multiprocessors: int
    memory_mib: float | None = None
    """None: no public report was found."""
    source: str = ""
    """The report."""


def _gib(gib: float) -> float:
    return gib * 1024


_REPORTED = {
    "B200": OnDevice(
        multiprocessors=148,
        memory_mib=182_631,
        source="get_device_properties of a B200, torch's printed form, in public benchmark logs",
    ),
    "H200": OnDevice(
        multiprocessors=132,
        memory_mib=143_156,
        source="get_device_properties of an H200, torch's printed form, in public scripts",
    ),
    "GH200-96": OnDevice(multiprocessors=132),
    "H100-80": OnDevice(
        multiprocessors=132,
        memory_mib=_gib(79.11),
        source="vllm-project/vllm issue 27508",
    ),
    "H100-NVL": OnDevice(
        multiprocessors=132,
        memory_mib=_gib(93.0),
        source="ali-vilab/VACE issue 56",
    ),
    "H100-PCIE-80": OnDevice(
        multiprocessors=114,
        memory_mib=81_008,
        source="get_device_properties of an H100 PCIe, torch's printed form, in public examples",
    ),
    "H20": OnDevice(
        multiprocessors=78,
        memory_mib=97_285,
        source="get_device_properties of an H20, torch's printed form, in public kernels",
    ),
    "A100-80": OnDevice(
        multiprocessors=108,
        memory_mib=_gib(79.15),
        source="out-of-memory messages quoted in Hugging Face's documentation of TRL",
    ),
    "A100-40": OnDevice(
        multiprocessors=108,
        memory_mib=42_298_834_944 / 2**20,
        source="deviceQuery in bottlerocket-os/bottlerocket pull request 3873",
    ),
    "A40": OnDevice(
        multiprocessors=84,
        memory_mib=45_416,
        source="get_device_properties of an A40, torch's printed form, in public logs",
    ),
    "A30": OnDevice(
        multiprocessors=56,
        memory_mib=_gib(23.53),
        source="google/RB-Modulation issue 5",
    ),
    "A10": OnDevice(
        multiprocessors=72,
        memory_mib=_gib(21.99),
        source="zai-org/CogVLM issue 236",
    ),
    "A10G": OnDevice(
        multiprocessors=80,
        memory_mib=22_587,
        source="get_device_properties of an A10G with torch 2.15, in public logs; older: 22,723",
    ),
    "L40S": OnDevice(
        multiprocessors=142,
        memory_mib=45_589,
        source="get_device_properties of an L40S, torch's printed form, in public logs",
    ),
    "L40": OnDevice(
        multiprocessors=142,
        memory_mib=_gib(44.40),
        source="QwenLM/Qwen3-VL issue 2097",
    ),
    "L4": OnDevice(
        multiprocessors=58,
        memory_mib=_gib(22.03),
        source="out-of-memory messages of Google Cloud's g2 instances, many public reports",
    ),
    "V100-32": OnDevice(
        multiprocessors=80,
        memory_mib=_gib(31.74),
        source="liucongg/ChatGLM-Finetuning issue 73",
    ),
    "V100-16": OnDevice(
        multiprocessors=80,
        memory_mib=16_130,
        source="get_device_properties of a V100-SXM2-16GB, in public logs; also 16,151 and 16,160",
    ),
    # Of the 15,360 MiB that nvidia-smi shows older drivers give 14.75 GiB: hpcaitech/Open-Sora
    # issue 697.
    "T4": OnDevice(
        multiprocessors=40,
        memory_mib=_gib(14.56),
        source="Zheng-Chong/CatVTON issue 133",
    ),
    "P100": OnDevice(
        multiprocessors=56,
        memory_mib=16_276,
        source="get_device_properties of a P100-PCIE-16GB, in public logs",
    ),
    "P40": OnDevice(multiprocessors=30),
    "RTX6000-Ada": OnDevice(multiprocessors=142),
    "A6000": OnDevice(
        multiprocessors=84,
        memory_mib=48_676,
        source="get_device_properties of an RTX A6000, torch's printed form, in public benchmarks",
    ),
    "RTX5090": OnDevice(multiprocessors=170),
    "RTX4090": OnDevice(
        multiprocessors=128,
        memory_mib=_gib(23.64),
        source="ali-vilab/VGen issue 104",
    ),
    "RTX3090": OnDevice(
        multiprocessors=82,
        memory_mib=_gib(23.68),
        source="vllm-project/vllm issue 16343",
    ),
    "RTX3080": OnDevice(
        multiprocessors=68,
        memory_mib=_gib(9.78),
        source="zai-org/CogVideo issue 34",
    ),
}
# PCIe cards of which no report was found, and the boards with the same chip and memory.
_AS_BOARDS = {
    "A100-PCIE-80": "A100-80",
    "A100-PCIE-40": "A100-40",
    "V100-PCIE-32": "V100-32",
    "V100-PCIE-16": "V100-16",
}
ON_DEVICE: dict[str, OnDevice] = _REPORTED | {
    card: replace(_REPORTED[board], source=f"as the {board} with NVLink")
    for card, board in _AS_BOARDS.items()
}
