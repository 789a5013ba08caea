"""What rank 0 prints of the GPUs and of what is installed: one line each."""

from collections import Counter
from collections.abc import Iterator, Sequence

from zorse_megatron.schema.gpus.compute_capability import BF16_FROM, FLASH_FROM, Capability, spell
from zorse_megatron.software.machine_flags import FUSED_ADAM, NORMS
from zorse_megatron.software.rank_software import RankSoftware

ENGINE_ADAM = "Transformer Engine's FusedAdam"


def found_lines(ranks: Sequence[RankSoftware]) -> list[str]:
    """GPUs, bf16, attention, Transformer Engine, Apex and Adam; nothing without a GPU."""
    seen = [rank for rank in ranks if rank.gpu is not None]
    return list(_lines(seen)) if seen else []


def _lines(ranks: Sequence[RankSoftware]) -> Iterator[str]:
    gpus = [rank.gpu for rank in ranks if rank.gpu is not None]
    counts = Counter((gpu.name, gpu.capability) for gpu in gpus)
    listed = ", ".join(
        f"{count} x {name} (compute capability {spell(capability)})"
        for (name, capability), count in counts.items()
    )
    first = ranks[0]
    yield f"GPUs: {listed}; torch {first.torch} has code for all of them"
    capabilities = list(dict.fromkeys(gpu.capability for gpu in gpus))
    yield f"bf16: {_which(capabilities, BF16_FROM)}"
    yield f"attention: {_attention(first, capabilities)}"
    yield f"Transformer Engine: {first.transformer_engine or 'not installed'}"
    yield f"Apex: {'installed' if _has_apex(first) else 'not installed'}"
    yield f"Adam: {adam_of(first)}"


def adam_of(rank: RankSoftware) -> str:
    """The Adam that Megatron takes (`megatron/core/optimizer/__init__.py`)."""
    if rank.transformer_engine is not None:
        return ENGINE_ADAM
    if FUSED_ADAM in rank.extensions:
        return "Apex's FusedAdam"
    return "torch's AdamW (neither Transformer Engine nor Apex is installed)"


def _has_apex(rank: RankSoftware) -> bool:
    return NORMS in rank.extensions or FUSED_ADAM in rank.extensions


def _which(capabilities: Sequence[Capability], least: Capability) -> str:
    without = [spell(each) for each in capabilities if each < least]
    if not without:
        return "on all GPUs"
    if len(without) == len(capabilities):
        return f"on none of the GPUs (compute capability {spell(least)} and later have it)"
    return f"on all GPUs but those of compute capability {' and '.join(without)}"


def _attention(rank: RankSoftware, capabilities: Sequence[Capability]) -> str:
    if rank.transformer_impl == "local" or rank.transformer_engine is None:
        return "unfused, the only one of --transformer-impl local: scores take memory"
    flash = f"flash-attn {rank.flash_attention}" if rank.flash_attention else "cuDNN's fused one"
    return f"Transformer Engine's choice; {flash}: {_which(capabilities, FLASH_FROM)}"
