"""Compute capabilities of the well-known kinds of GPU, and what depends on them alone.

The figures are those of NVIDIA's list "CUDA GPU Compute Capability"; the H20 and the A10G, which it
does not name, have the chip of the H100 and of the A10.
"""

Capability = tuple[int, int]
"""(major, minor), as `torch.cuda.get_device_capability` returns it."""

BF16_FROM: Capability = (8, 0)
"""Units for bfloat16: see `data_sheet`."""
FLASH_FROM: Capability = (8, 0)
"""Flash and fused attention of Transformer Engine
(`transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend`)."""

TRITON_FROM: Capability = (7, 0)
"""Triton's kernels without products of matrices: torch's own compiler takes Triton from here on
(`torch._dynamo.device_interface`). Triton's README names 8.0, as its products use tensor cores from
there on only (triton-lang/triton#5066)."""

_KINDS: dict[Capability, tuple[str, ...]] = {
    (6, 0): ("P100",),
    (6, 1): ("P40",),
    (7, 0): ("V100-32", "V100-16", "V100-PCIE-32", "V100-PCIE-16"),
    (7, 5): ("T4",),
    (8, 0): ("A100-80", "A100-40", "A100-PCIE-80", "A100-PCIE-40", "A30"),
    (8, 6): ("A40", "A10", "A10G", "A6000", "RTX3090", "RTX3080"),
    (8, 9): ("L40S", "L40", "L4", "RTX6000-Ada", "RTX4090"),
    (9, 0): ("H200", "GH200-96", "H100-80", "H100-NVL", "H100-PCIE-80", "H20"),
    (10, 0): ("B200",),
    (12, 0): ("RTX5090",),
}

CAPABILITIES: dict[str, Capability] = {
    kind: capability for capability, kinds in _KINDS.items() for kind in kinds
}
"""Kind -> its compute capability; kinds of other vendors have none."""


def spell(capability: Capability) -> str:
    """Write a capability as NVIDIA does.

    >>> spell((7, 5))
    '7.5'
    """
    return ".".join(map(str, capability))
