"""What a kind of GPU can do: peaks, memory, compute capability."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# CUDA's compute capabilities, and what depends on them alone.


Capability = tuple[int, int]
"""(major, minor), as `torch.cuda.get_device_capability` returns it."""

BF16_FROM: Capability = (8, 0)
"""Units for bfloat16: `gpus.yaml` says who says so."""
FLASH_FROM: Capability = (8, 0)
"""Flash and fused attention of Transformer Engine
(`transformer_engine.pytorch.attention.dot_product_attention.utils.get_attention_backend`)."""

TRITON_FROM: Capability = (7, 0)
"""Triton's kernels without products of matrices: torch's own compiler takes Triton from here on
(`torch._dynamo.device_interface`)."""
PRODUCTS_IN_TRITON_FROM: Capability = (8, 0)
"""Before, it multiplies fp16 in fp32, an eighth as fast as V100 and T4 can: their tensor cores have
no instructions in Triton, whose README names 8.0 (triton-lang/triton#5066)."""


def spell(capability: Capability) -> str:
    """Write a capability as NVIDIA does.

    >>> spell((7, 5))
    '7.5'
    """
    return ".".join(map(str, capability))


ComputeDtype = Literal["fp16", "bf16", "fp32"]
"""What a group of a plan computes in, by the names of Megatron's flags."""
Dtype = Literal["float16", "bfloat16", "tf32", "float32"]
DtypeChoice = Dtype | Literal["auto"]
"""What a job computes in; auto: each group in a type of its own."""
LinkType = Literal["nvswitch", "nvlink", "pcie"]
Attention = Literal["flash", "unfused"]
"""flash: core attention keeps no scores (flash-attention's kernels, or cuDNN's fused ones)."""

DTYPE_OF: dict[ComputeDtype, Dtype] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What a group computes in, as cost models name it; what is to be preferred comes first."""


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """Peak rate of dense matrix products by type of number; None where there is no such unit."""

    float32_flops_per_s: float
    """On the plain cores, which is what PyTorch uses by default."""
    float16_flops_per_s: float | None = None
    """With sums in float32, without sparsity."""
    bfloat16_flops_per_s: float | None = None
    """As float16."""
    tf32_flops_per_s: float | None = None
    """float32 on tensor cores."""

    def of(self, dtype: Dtype) -> float:
        """Return the rate of `dtype`. Raises LookupError where the GPU has no unit for it.

        tf32 is only a way to run float32, so GPUs without it run that.
        """
        rate: float | None = getattr(self, f"{dtype}_flops_per_s")
        if rate is None and dtype == "tf32":
            return self.float32_flops_per_s
        if rate is None:
            raise LookupError(f"no peak rate for {dtype}")
        return rate


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """A kind of GPU, and how machines that have it are usually wired."""

    name: str
    memory_bytes: int
    """What a program can have of it: what CUDA reports where that is known."""
    memory_bytes_per_s: float
    """Published bandwidth of its own memory."""
    peak: PeakFlops
    link_type: LinkType
    """How GPUs of this kind are usually joined in a node."""
    link_bytes_per_s: float
    """What one GPU reaches to another one in the node, one way."""
    host_link_bytes_per_s: float
    """What one GPU reaches to pinned host memory, one way."""
    source: str
    """Where the figures come from."""
    like: str | None = None
    """The well-known kind that it is, or that gave what a cluster file left out."""
    unconfirmed: tuple[str, ...] = ()
    """Those of them that its vendor was not found to have published, as the documents call them."""
    advertised_gb: int | None = None
    """Memory as its name and its data sheet have it, in decimal GB."""
    memory_source: str | None = None
    """Who saw `memory_bytes` on one; None: it is the advertised size, or somebody's own word."""
    capability: Capability | None = None
    """CUDA's compute capability."""
    multiprocessors: int | None = None
    """Streaming multiprocessors."""
    context_bytes: int | None = None
    """What a process was measured to have there beside torch's allocator."""
    attention: Attention | None = None
    """What somebody said that Transformer Engine runs on it; None: see `runs_flash_attention`."""

    @property
    def runs_flash_attention(self) -> bool:
        """Whether Transformer Engine has flash or fused attention for it.

        It turns both off below compute capability 8.0 (`get_attention_backend` of its
        dot-product attention), as flash-attention 2 and cuDNN's fused attention have no kernels
        there. bfloat16 came with the same capability, for kinds whose own
        is not known.
        """
        if self.attention is not None:
            return self.attention == "flash"
        if self.capability is not None:
            return self.capability >= FLASH_FROM
        return self.computes_in("bf16")

    def computes_in(self, dtype: ComputeDtype | None) -> bool:
        """Whether it has units for a group's type; None: for what the job computes in."""
        match dtype:
            case "fp16":
                return self.peak.float16_flops_per_s is not None
            case "bf16":
                return self.peak.bfloat16_flops_per_s is not None
            case _:
                return True


def common_dtype(kinds: Iterable[GpuKind]) -> ComputeDtype:
    """Return the first of bf16, fp16 and fp32 that all these kinds have units for.

    bf16 comes first as its range is that of fp32: it needs no loss scale.
    """
    members = tuple(kinds)
    return next(dtype for dtype in DTYPE_OF if all(kind.computes_in(dtype) for kind in members))
