"""The model: its shape, the well-known ones by name, and how a training command computes it.

Counts are those of Megatron-Core's GPT: fused QKV and (gated) feed-forward layers, norms before
attention, before the feed-forward block and at the end. `tensor_parallel` ranks split the matrices
and the biases that follow their columns; norms and the other biases are on every rank. Where layers
have experts (`inputs.experts`), these are in place of the feed-forward block.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.errors import Problem
from zorse_megatron.gpus.gpu import Attention
from zorse_megatron.inputs.experts import Experts, experts_problems
from zorse_megatron.inputs.lora import Lora
from zorse_megatron.plan.plan import ModelFingerprint

Activation = Literal["gelu", "relu", "squared_relu", "swiglu", "geglu"]
Norm = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rope", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of equal layers, as far as time and memory depend on it."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key and value heads."""
    kv_channels: int
    """Width of one head."""
    vocab_size: int
    """Rows of the embedding table, padding included."""
    seq_length: int
    tied_embeddings: bool = False
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    position_embedding: PositionEmbedding = "rope"
    max_positions: int = 0
    """Rows of the learned position table; 0 without one."""
    linear_bias: bool = True
    """Biases in all linear layers of the transformer block."""
    qkv_bias: bool = False
    """With linear_bias off: biases of query, key and value still."""
    qk_norm: bool = False
    """Norms of query and key heads."""
    experts: Experts | None = None
    """Those of each layer; None: every layer has one feed-forward block."""

    @property
    def is_gated(self) -> bool:
        """Whether the first feed-forward matrix has a gate beside it."""
        return self.activation in ("swiglu", "geglu")

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_width(self) -> int:
        """Elements of all keys and values of a token."""
        return 2 * self.num_query_groups * self.kv_channels

    @property
    def ffn_width(self) -> int:
        """Input elements of the second feed-forward matrices that a token passes."""
        return self.experts.active_width if self.experts else self.ffn_hidden_size

    @property
    def ffn_input_width(self) -> int:
        """Output elements of the first feed-forward matrices that a token passes."""
        return self.ffn_width * (2 if self.is_gated else 1)

    @property
    def ffn_blocks(self) -> int:
        """Feed-forward blocks that a token passes in a layer."""
        return self.experts.blocks_per_token if self.experts else 1

    def layer_matrix_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of the matrices of one layer on each rank that a token passes: what costs time
        per token."""
        feed_forward = self.hidden_size * (self.ffn_input_width + self.ffn_width)
        return (self._attention_matrices + feed_forward) // tensor_parallel + self._router

    def layer_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of one transformer layer on each rank, those of all its experts included."""
        matrices, biases = self._attention_matrices, 0
        whole = 2 * self.norm_parameters
        if self.linear_bias or self.qkv_bias:
            biases += self.query_width + self.key_value_width
        if self.linear_bias:
            whole += self.hidden_size  # after attention
        if self.qk_norm:
            whole += 2 * self.kv_channels * self._norm_vectors
        if self.experts is None:
            matrices += self.hidden_size * (self.ffn_input_width + self.ffn_width)
            biases += self.ffn_input_width * self.linear_bias
            whole += self.hidden_size * self.linear_bias  # after the feed-forward block
        else:
            whole += self._router + self.experts.num_experts * self.linear_bias
            whole += self.expert_parameters
        return matrices // tensor_parallel + biases // tensor_parallel + whole

    @property
    def expert_parameters(self) -> int:
        """Those of all experts of a layer, the shared one included; 0 without any."""
        if self.experts is None:
            return 0
        first_matrices = 2 if self.is_gated else 1
        matrices = self.hidden_size * self.experts.held_width * (first_matrices + 1)
        biases = first_matrices * self.experts.ffn_hidden_size + self.hidden_size
        return matrices + self.experts.num_experts * biases * self.linear_bias

    @property
    def _attention_matrices(self) -> int:
        return self.hidden_size * (2 * self.query_width + self.key_value_width)

    @property
    def _router(self) -> int:
        """Elements of its matrix."""
        return self.experts.router_parameters(self.hidden_size) if self.experts else 0

    @property
    def attention_parameters(self) -> int:
        """Those of one layer that TP groups cut by KV groups."""
        has_bias = self.linear_bias or self.qkv_bias
        return self._attention_matrices + (
            self.query_width + self.key_value_width if has_bias else 0
        )

    @property
    def mlp_parameters(self) -> int:
        """Those of one layer that TP groups cut by columns of the MLP."""
        matrices = self.hidden_size * (self.ffn_input_width + self.ffn_hidden_size)
        return matrices + (self.ffn_input_width if self.linear_bias else 0)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden_size * self._norm_vectors

    @property
    def _norm_vectors(self) -> int:
        return 2 if self.norm == "layernorm" else 1

    def table_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of the token table on each rank; the output layer has as many."""
        return self.vocab_size // tensor_parallel * self.hidden_size

    def embedding_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of token and position embedding on each rank."""
        positions = self.max_positions if self.position_embedding == "learned" else 0
        return self.table_parameters(tensor_parallel) + positions * self.hidden_size

    def head_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of the final norm and of an output layer of its own on each rank."""
        own = 0 if self.tied_embeddings else self.table_parameters(tensor_parallel)
        return self.norm_parameters + own

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        layers = self.num_layers * self.layer_parameters()
        return self.embedding_parameters() + layers + self.head_parameters()

    def fingerprint(self) -> ModelFingerprint:
        """Return what a plan says about the model that it was made for."""
        experts = self.experts
        return ModelFingerprint(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            num_experts=experts.num_experts if experts else None,
            moe_router_topk=experts.per_token if experts else None,
            moe_ffn_hidden_size=experts.ffn_hidden_size if experts else None,
        )


@dataclass(frozen=True, kw_only=True)
class OtherShape(ModelShape):
    """A model whose layers have other parameters than Megatron's, whole on every rank of a TP
    group."""

    more_in_layer: int = 0
    """Parameters beside those of Megatron's layer; below 0: it has fewer."""
    more_in_embedding: int = 0
    more_in_head: int = 0

    def layer_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of one transformer layer on each rank."""
        return super().layer_parameters(tensor_parallel) + self.more_in_layer

    def embedding_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of token and position embedding on each rank, and of a norm after them."""
        return super().embedding_parameters(tensor_parallel) + self.more_in_embedding

    def head_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of the final norm and of an output layer of its own on each rank."""
        return super().head_parameters(tensor_parallel) + self.more_in_head


def padded_vocab_size(size: int, *, divisible_by: int = 128, tensor_parallel: int = 1) -> int:
    """Return the rows that Megatron gives a vocabulary of `size`.

    >>> padded_vocab_size(50257), padded_vocab_size(50257, tensor_parallel=4)
    (50304, 50688)
    """
    multiple = divisible_by * tensor_parallel
    return -(-size // multiple) * multiple


def default_ffn_hidden_size(hidden_size: int, activation: Activation) -> int:
    """Return what Megatron takes where nothing is said.

    >>> default_ffn_hidden_size(4096, "gelu"), default_ffn_hidden_size(4096, "swiglu")
    (16384, 10880)
    """
    if activation == "swiglu":
        return int((4 * hidden_size * 2 / 3) / 64) * 64
    return 4 * hidden_size


def problems_of(shape: ModelShape, *, has_kv_channels: bool = True) -> Iterator[Problem]:
    """Yield what does not fit together in a shape."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if not has_kv_channels and shape.hidden_size % heads:
        yield Problem(
            where="num_attention_heads",
            found=f"{heads} heads with hidden_size {shape.hidden_size}",
            expected="a number of heads that divides hidden_size",
            remedy="Correct one of them, or give kv_channels.",
        )
    if heads % groups:
        yield Problem(
            where="num_query_groups",
            found=f"{groups} with {heads} query heads",
            expected="a divisor of num_attention_heads",
            remedy="Every key head serves the same number of query heads.",
        )
    if shape.position_embedding == "learned" and shape.max_positions < shape.seq_length:
        yield Problem(
            where="max_positions",
            found=f"{shape.max_positions} with seq_length {shape.seq_length}",
            expected="at least seq_length",
            remedy="Learned positions must reach to the end of a sample.",
        )
    if shape.experts is not None:
        yield from experts_problems(shape.experts, linear_bias=shape.linear_bias)


# Well-known models, and those of published measurements.
#
# Llama 1: Touvron et al. 2023 (arXiv 2302.13971). Llama 3: Grattafiori et al. 2024 (arXiv
# 2407.21783). llama-3b: OpenLLaMA. llama-1b: TinyLlama, with as many key heads as query heads, as
# the authors of Zorse measured it. olmoe-1b-7b: Muennighoff et al. 2024 (arXiv 2409.02060), with
# norms of single query and key heads, as Megatron has them, where theirs are over all heads.
# qwen3-30b-a3b: Yang et al. 2025 (arXiv 2505.09388). mixtral-8x7b: Jiang et al. 2024 (arXiv
# 2401.04088). GPT-3: Brown et al. 2020 (arXiv 2005.14165). The `sailor-` shapes are those that the
# authors of Sailor (SOSP 2025) measured: GPT-2's vocabulary, learned positions, biases throughout;
# their Llama has plain heads, a tied table and a feed-forward width of 4 x hidden.


_GPT2_VOCAB = 50304  # 50,257 padded to a multiple of 128
_LLAMA_VOCAB = 32000


def _llama(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int | None = None,
    head: int | None = None,
    vocab: int = _LLAMA_VOCAB,
    seq: int = 2048,
    experts: Experts | None = None,
    qk_norm: bool = False,
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        kv_channels=head or hidden // heads,
        vocab_size=vocab,
        seq_length=seq,
        activation="swiglu",
        norm="rmsnorm",
        linear_bias=False,
        qk_norm=qk_norm,
        experts=experts,
    )


def _gpt(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    heads: int,
    tied: bool = False,
    activation: Activation = "gelu",
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=_GPT2_VOCAB,
        seq_length=2048,
        tied_embeddings=tied,
        activation=activation,
        position_embedding="learned",
        max_positions=2048,
    )


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-1b", num_layers=22, hidden=2048, ffn=5632, heads=32),
        _llama("llama-3b", num_layers=26, hidden=3200, ffn=8640, heads=32),
        _llama("llama-7b", num_layers=32, hidden=4096, ffn=11008, heads=32),
        _llama("llama-13b", num_layers=40, hidden=5120, ffn=13824, heads=40),
        _llama("llama-33b", num_layers=60, hidden=6656, ffn=17920, heads=52),
        _llama("llama-65b", num_layers=80, hidden=8192, ffn=22016, heads=64),
        _llama(
            "llama3-8b",
            num_layers=32,
            hidden=4096,
            ffn=14336,
            heads=32,
            groups=8,
            vocab=128256,
            seq=8192,
        ),
        _llama(
            "llama3-70b",
            num_layers=80,
            hidden=8192,
            ffn=28672,
            heads=64,
            groups=8,
            vocab=128256,
            seq=8192,
        ),
        _llama(
            "olmoe-1b-7b",
            num_layers=16,
            hidden=2048,
            ffn=1024,
            heads=16,
            vocab=50304,
            seq=4096,
            experts=Experts(num_experts=64, per_token=8, ffn_hidden_size=1024, scores_all=True),
            qk_norm=True,
        ),
        _llama(
            "qwen3-30b-a3b",
            num_layers=48,
            hidden=2048,
            ffn=6144,
            heads=32,
            groups=4,
            head=128,
            vocab=151936,
            seq=4096,
            experts=Experts(num_experts=128, per_token=8, ffn_hidden_size=768),
            qk_norm=True,
        ),
        _llama(
            "mixtral-8x7b",
            num_layers=32,
            hidden=4096,
            ffn=14336,
            heads=32,
            groups=8,
            seq=4096,
            experts=Experts(num_experts=8, per_token=2, ffn_hidden_size=14336),
        ),
        _gpt("gpt-1.3b", num_layers=24, hidden=2048, heads=16),
        _gpt("gpt-2.7b", num_layers=32, hidden=2560, heads=32),
        _gpt("gpt-6.7b", num_layers=32, hidden=4096, heads=32),
        _gpt("sailor-opt-350m", num_layers=24, hidden=1024, heads=16, activation="relu"),
        _gpt("sailor-opt-30b", num_layers=48, hidden=7168, heads=56, activation="relu"),
        _gpt("sailor-gpt-neo-2.7b", num_layers=32, hidden=2560, heads=20, tied=True),
        dataclasses.replace(
            _llama(
                "sailor-llama3-8b",
                num_layers=32,
                hidden=4096,
                ffn=16384,
                heads=32,
                vocab=_GPT2_VOCAB,
                seq=8192,
            ),
            linear_bias=True,
            tied_embeddings=True,
        ),
    )
}

# Names in the published measurements.
_ALIASES = {
    "opt-350": "sailor-opt-350m",
    "opt-30": "sailor-opt-30b",
    "gpt-neo-2.7": "sailor-gpt-neo-2.7b",
    "llama-3-8": "sailor-llama3-8b",
}


def canonical_model(name: str) -> str:
    """Return our spelling of a well-known model; an unknown name comes back as it is.

    >>> canonical_model("OPT-350"), canonical_model("Llama-7B"), canonical_model("mine")
    ('sailor-opt-350m', 'llama-7b', 'mine')
    """
    lower = name.lower()
    known = _ALIASES.get(lower, lower)
    return known if known in MODELS else name


# How a training command computes, as far as time and memory depend on it.


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
    """Whether tensor-parallel groups split activations between layers along the sequence, too."""
    narrow_gradients: bool = False
    """Whether 16-bit training accumulates gradients in 16 bits."""
    recompute: JobRecompute | None = None
    modules: tuple[Module, ...] = ("core_attn",)
    """What selective recomputation recomputes."""
    sample_block: int = 1
    """Sizes of micro-batches are multiples of it: the auxiliary loss of experts is one of so many
    samples."""
    has_auxiliary_loss: bool = False
    """Whether routers have a loss that balances their experts."""
    router_bytes: int = 0
    """Of a score of an expert, where the command says its type; 0: as all activations."""
    lora: Lora | None = None
    """The adapters, where these alone are trained; None: all weights are."""


USUAL = Computing(attention="flash")
"""How a model without a command computes: no dropout, attention keeps no scores."""


def fingerprint_of(shape: ModelShape, computing: Computing) -> ModelFingerprint:
    """Return what a plan says of the model that it was made for, and of its adapters."""
    lora = None if computing.lora is None else str(computing.lora)
    return dataclasses.replace(shape.fingerprint(), lora=lora)
