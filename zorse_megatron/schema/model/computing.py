"""How a training command computes, as far as time and memory depend on it."""

from dataclasses import dataclass
from typing import Literal

from zorse_megatron.schema.gpus.gpu import Attention

Module = Literal["core_attn", "mlp", "layernorm"]


@dataclass(frozen=True, kw_only=True)
class JobRecompute:
    """What is recomputed in groups whose plan does not say (Megatron's `--recompute-*`)."""

    mode: Literal["selective", "full"]
    num_layers: int | None = None
    """With full: how many layers of each chunk; None: all."""
    layers_at_once: int = 1
    """With full: this many layers keep one input between them, and are recomputed together."""


@dataclass(frozen=True, kw_only=True)
class Computing:
    """What a command says beside model, type and batch."""

    attention: Attention | None = None
    """flash: scores are never whole in memory. None: as the implementation chooses on each GPU."""
    names_attention: bool = False
    """Whether the command asks for flash or fused attention on all GPUs."""
    is_local: bool = False
    """Whether layers are Megatron's own, with unfused attention, and not Transformer Engine's."""
    softmax_in_fp32: bool = False
    """Whether unfused attention keeps its softmax in fp32 beside the 16-bit one."""
    hidden_dropout: bool = False
    attention_dropout: bool = False
    sequence_parallel: bool = False
    """Whether tensor-parallel sets split activations between layers along the sequence, too."""
    narrow_gradients: bool = False
    """Whether 16-bit training accumulates gradients in 16 bits."""
    recompute: JobRecompute | None = None
    modules: tuple[Module, ...] = ("core_attn",)
    """What selective recomputation recomputes."""


USUAL = Computing(attention="flash")
"""How a model without a command computes: no dropout, attention keeps no scores."""
