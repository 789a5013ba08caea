"""What core attention runs on each kind of GPU.

Transformer Engine chooses on each rank by itself (`get_attention_backend`): flash attention or
cuDNN's fused attention in 16 bits from compute capability 8.0 on, and unfused attention, which
keeps all scores, for everything else. Megatron's own layers have unfused attention only.
"""

from collections.abc import Mapping

from zorse_megatron.costs.efficiency import is_sixteen_bit
from zorse_megatron.schema.gpus.gpu import Attention, Dtype, GpuKind
from zorse_megatron.schema.model.computing import Computing


def attention_on(gpu: GpuKind, computing: Computing, dtype: Dtype) -> Attention:
    """Return what core attention runs on a kind, as far as time and memory depend on it."""
    if computing.attention == "unfused" or not gpu.runs_flash_attention:
        return "unfused"
    if computing.attention is None and not is_sixteen_bit(dtype):
        return "unfused"
    return "flash"


def attention_by_kind(
    kinds: Mapping[str, GpuKind], computing: Computing, dtype: Dtype
) -> dict[str, Attention]:
    """Kind -> what core attention runs there."""
    return {name: attention_on(gpu, computing, dtype) for name, gpu in kinds.items()}


def attention_phrase(by_kind: Mapping[str, Attention]) -> str:
    """Say it of all kinds.

    >>> attention_phrase({"A100-40": "flash", "T4": "unfused", "V100-16": "unfused"})
    'flash attention on A100-40, unfused attention on T4 and V100-16'
    >>> attention_phrase({"A100-40": "flash"})
    'flash attention'
    """
    kinds_of: dict[Attention, list[str]] = {}
    for kind, attention in by_kind.items():
        kinds_of.setdefault(attention, []).append(kind)
    if len(kinds_of) == 1:
        return f"{next(iter(kinds_of))} attention"
    return ", ".join(
        f"{attention} attention on {' and '.join(names)}" for attention, names in kinds_of.items()
    )
