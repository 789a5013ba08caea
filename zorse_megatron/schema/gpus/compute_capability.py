"""CUDA's compute capabilities, and what depends on them alone."""

Capability = tuple[int, int]
"""(major, minor), as `torch.cuda.get_device_capability` returns it."""

BF16_FROM: Capability = (8, 0)
"""Units for bfloat16: `gpus.yaml` says who says so."""
FLASH_FROM: Capability = (8, 0)
"""Flash and fused attention of Transformer Engine
(`transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend`)."""

TRITON_FROM: Capability = (7, 0)
"""Triton's kernels without products of matrices: torch's own compiler takes Triton from here on
(`torch._dynamo.device_interface`). Triton's README names 8.0, as its products use tensor cores from
there on only (triton-lang/triton#5066)."""


def spell(capability: Capability) -> str:
    """Write a capability as NVIDIA does.

    >>> spell((7, 5))
    '7.5'
    """
    return ".".join(map(str, capability))
