"""What a `model_type` of Hugging Face's transformers says of a model beside the keys of its file.

Defaults are those of transformers' configuration classes.
"""

from dataclasses import dataclass
from typing import Any, Literal

from zorse_megatron.inputs.experts import Experts
from zorse_megatron.inputs.model import Norm, PositionEmbedding


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a `model_type` implies beside its keys; the defaults are Llama's."""

    activation: str = "silu"
    """Where the file names none."""
    is_gated: bool = True
    norm: Norm = "rmsnorm"
    norms: int = 2
    """In a layer."""
    position: PositionEmbedding = "rope"
    biases: Literal["none", "qkv", "mlp", "all"] = "none"
    bias_key: str | None = None
    """Says whether linear layers have biases."""
    qk_norm: bool = False
    tied: bool = False
    """Where the file does not say."""
    head_dim: int | None = None
    """Where the file does not say; None: hidden size by heads."""
    positions: int | None = None
    """The longest sample where the file does not say."""
    more_positions: int = 0
    """Rows of the table that no position of a sample takes."""
    rotary: float = 1.0
    """Share of a head that is rotated, where the file does not say."""
    is_multi_query: bool = False
    """Whether all heads share key and value, where the file does not say."""
    parallel_key: str | None = None
    """Says whether attention and feed-forward run side by side."""
    is_parallel: bool = False
    """Where the file does not say."""
    experts: Experts | None = None
    """Those of each layer where the file does not say; None: it has none."""
    has_wide_experts: bool = False
    """Whether the width of an expert has the key of dense blocks, and not one of its own."""
    norms_all_heads: bool = False
    """Whether query and key are normalized over all heads together."""
    has_head_bias: bool = False
    has_embedding_norm: bool = False
    lacks: tuple[str, ...] = ()
    """What Megatron's flags cannot build of it."""


PARALLEL = "attention and feed-forward side by side"
_SANDWICH = "norms after attention and feed-forward"
_SCALED = "embeddings times the root of the width"
_GPT: dict[str, Any] = {"norm": "layernorm", "is_gated": False, "biases": "all"}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "phi3": Family(),
    "qwen2": Family(biases="qkv"),
    "qwen3": Family(qk_norm=True, head_dim=128),
    "mixtral": Family(
        experts=Experts(num_experts=8, per_token=2, ffn_hidden_size=14336), has_wide_experts=True
    ),
    "qwen2_moe": Family(
        biases="qkv",
        experts=Experts(
            num_experts=60, per_token=4, ffn_hidden_size=1408, shared_ffn_hidden_size=5632,
            has_shared_gate=True, scores_all=True,
        ),
    ),
    "qwen3_moe": Family(
        qk_norm=True,
        experts=Experts(num_experts=128, per_token=8, ffn_hidden_size=768, scores_all=True),
    ),
    "olmoe": Family(
        qk_norm=True, norms_all_heads=True, has_wide_experts=True,
        experts=Experts(num_experts=64, per_token=8, ffn_hidden_size=2048, scores_all=True),
        lacks=("norms of queries and keys over all heads",),
    ),
    "smollm3": Family(tied=True, lacks=("layers without positions",)),
    "granite": Family(lacks=("multipliers of its own",)),
    "gemma": Family(
        activation="gelu_pytorch_tanh", tied=True, head_dim=256, lacks=(_SCALED,)
    ),
    "gemma2": Family(
        activation="gelu_pytorch_tanh", tied=True, head_dim=256, norms=4,
        lacks=(_SANDWICH, "capped logits", _SCALED),
    ),
    "gemma3_text": Family(
        activation="gelu_pytorch_tanh", tied=True, head_dim=256, norms=4, qk_norm=True,
        lacks=(_SANDWICH, _SCALED),
    ),
    "gpt2": Family(**_GPT, activation="gelu_new", position="learned", tied=True),
    "gpt_bigcode": Family(
        **_GPT, activation="gelu_pytorch_tanh", position="learned", tied=True, is_multi_query=True
    ),
    "opt": Family(**_GPT, activation="relu", position="learned", more_positions=2, tied=True),
    "starcoder2": Family(
        **_GPT, activation="gelu_pytorch_tanh", bias_key="use_bias", tied=True
    ),
    "gpt_neox": Family(
        **_GPT, activation="gelu", rotary=0.25,
        parallel_key="use_parallel_residual", is_parallel=True,
    ),
    "phi": Family(
        **_GPT, activation="gelu_new", norms=1, rotary=0.5, is_parallel=True, has_head_bias=True
    ),
    "gptj": Family(
        **(_GPT | {"biases": "mlp"}), activation="gelu_new", norms=1, is_parallel=True,
        has_head_bias=True, lacks=("rotation of single dimensions of a head",),
    ),
    "falcon": Family(
        **(_GPT | {"biases": "none"}), activation="gelu", bias_key="bias", tied=True,
        positions=2048, is_multi_query=True, parallel_key="parallel_attn", is_parallel=True,
    ),
    "bloom": Family(
        **_GPT, activation="gelu", position="none", tied=True, positions=2048,
        has_embedding_norm=True, lacks=("ALiBi", "a norm after the embedding"),
    ),
    "nemotron": Family(
        **(_GPT | {"biases": "none"}), activation="relu2", rotary=0.5,
        lacks=("norms with weights around 1",),
    ),
    # Its norms have no biases.
    "cohere": Family(
        tied=True, norms=1, is_parallel=True, lacks=("norms without biases", "scaled logits")
    ),
}  # fmt: skip
# Other types that people have -> what their layers have that no GPT layers have.
REFUSED = {
    "gemma3": "images",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "llama4": "layers of several kinds and images",
    "gpt_oss": "attention sinks, windows in some layers and biases of experts",
    "mllama": "images",
}
