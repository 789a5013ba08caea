"""Fraction of their published peak that GPUs reach in transformer layers.

A layer's pass takes operations / (peak x share) + bytes / memory bandwidth. The shares below
were fitted to the layer times that the authors of Zorse published (MLSys 2026, MIT licence; sums of
kernel times of Llama and GPT layers, PyTorch without fused element-wise kernels), least mean
relative error by kind of GPU, type of number and pass. The traffic factors were fitted to all of
them together. What is left of the error is in docs/simulator.md. A share above 1 says that
the GPU clocks higher than its data sheet assumes.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zorse_megatron.schema.gpus.gpu import Dtype


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the peak rate of matrix products."""

    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class LayerTraffic:
    """Memory traffic of one pass."""

    elementwise_passes: float
    """Multiples of what fused kernels would move (`flops.elementwise_bytes`)."""
    bytes_per_parameter: float
    """Traffic per weight at any micro-batch size: read it; read, add and write its gradient."""


def _table(rows: dict[str, tuple[float, float]]) -> dict[str, Shares]:
    return {kind: Shares(forward=f, backward=b) for kind, (f, b) in rows.items()}


_SIXTEEN_BIT = _table(
    {
        "H100-NVL": (0.53, 0.46),
        "A100-80": (0.88, 0.82),
        "A100-40": (0.92, 0.84),
        "A10G": (1.06, 0.97),
        "A6000": (1.03, 0.86),
        "L4": (0.88, 0.55),
        "V100-16": (0.80, 0.75),
        "V100-PCIE-16": (0.77, 0.77),
        "T4": (0.52, 0.40),
        "P100": (0.39, 0.41),
        "P40": (0.58, 0.70),
        "W6800": (0.40, 0.56),
    }
)
_FLOAT32 = _table(
    {
        "H100-NVL": (0.71, 0.73),
        "A100-40": (0.98, 0.97),
        "A10G": (0.58, 0.70),
        "A6000": (0.52, 0.64),
        "L40S": (0.44, 0.55),
        "L4": (0.31, 0.39),
        "V100-16": (0.97, 0.94),
        "V100-PCIE-16": (1.00, 0.97),
        "T4": (0.56, 0.55),
        "P100": (0.84, 0.84),
        "P40": (0.73, 0.77),
    }
)
# Kinds with the same chip as a fitted one, or one of its family, but other figures.
_SAME_FAMILY = {
    "H200": "H100-NVL",
    "GH200-96": "H100-NVL",
    "H100-80": "H100-NVL",
    "H100-PCIE-80": "H100-NVL",
    "A100-PCIE-80": "A100-80",
    "A40": "A6000",
    "RTX6000-Ada": "L40S",
    "RTX3090": "A6000",
    "RTX3080": "A6000",
    "RTX3080Ti": "A6000",
    "A5000": "A6000",
    "A4500": "A6000",
}
# Where nothing was fitted: about the median of the table.
_USUAL = Shares(forward=0.70, backward=0.65)

_TRAFFIC: dict[bool, tuple[LayerTraffic, LayerTraffic]] = {
    True: (
        LayerTraffic(elementwise_passes=7.5, bytes_per_parameter=2.0),
        LayerTraffic(elementwise_passes=13.5, bytes_per_parameter=22.0),
    ),
    False: (
        LayerTraffic(elementwise_passes=7.5, bytes_per_parameter=4.0),
        LayerTraffic(elementwise_passes=13.5, bytes_per_parameter=16.0),
    ),
}


def shares_of(names: Iterable[str], dtype: Dtype) -> tuple[Shares, bool]:
    """Return the shares of a kind, and whether they were fitted to it or to its chip.

    `names` are that of the kind and those of kinds with the same figures.
    """
    table = _SIXTEEN_BIT if is_sixteen_bit(dtype) else _FLOAT32
    if dtype != "tf32":  # nothing public is measured on tensor cores in tf32
        for name in names:
            fitted = table.get(name) or table.get(_SAME_FAMILY.get(name, ""))
            if fitted is not None:
                return fitted, True
    return _USUAL, False


def traffic_of(dtype: Dtype) -> tuple[LayerTraffic, LayerTraffic]:
    """Return the traffic of forward and backward."""
    return _TRAFFIC[is_sixteen_bit(dtype)]


def is_sixteen_bit(dtype: Dtype) -> bool:
    """Whether a number takes two bytes."""
    return dtype in ("float16", "bfloat16")


def element_bytes(dtype: Dtype) -> int:
    """Return the bytes of one number."""
    return 2 if is_sixteen_bit(dtype) else 4
