"""The model: its shape, the well-known ones by name, and how a training command computes it.

Counts are those of Megatron-Core's GPT: fused QKV and (gated) feed-forward layers, norms before
attention, before the feed-forward block and at the end. `tensor_parallel` ranks split the matrices
and the biases that follow their columns; norms and the other biases are on every rank.

Layers with experts (Shazeer et al. 2017, arXiv 1701.06538) have these in place of the feed-forward
block: a router gives each token to some of them, and sums up their results by its scores. All
layers of a model have the same experts, but for those that are dense; each rank holds all of them,
or some. What is said of a layer is of one with experts, where there are any.
"""

import dataclasses
import math
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from zorse_megatron.files.yaml_text import read_table
from zorse_megatron.gpus.gpu import Attention
from zorse_megatron.inputs.lora import Lora
from zorse_megatron.plan.plan import Count, ModelFingerprint, Positive

Activation = Literal["gelu", "relu", "squared_relu", "swiglu", "geglu"]
Norm = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rope", "none"]
_POSITION_FLAGS = {"learned": "learned_absolute"}  # where Megatron's word is another
USUAL_DIVISOR = 128
"""Megatron's, of the rows of the embedding table."""
SHARED_EXPERT_FLAG = "--moe-shared-expert-intermediate-size"
LATENT_FLAG = "--multi-latent-attention"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer."""

    num_experts: int
    per_token: int
    """Experts that a token passes."""
    ffn_hidden_size: int
    """Width of one expert."""
    shared_ffn_hidden_size: int = 0
    """Width of the shared expert, which every token passes; 0 without one."""
    has_shared_gate: bool = False
    """Whether a gate of each token scales what the shared expert gives."""
    scores_all: bool = False
    """Whether the scores of all experts are normalized, and not those of the chosen alone
    (`--moe-router-pre-softmax`)."""

    @property
    def num_held(self) -> int:
        """Those that a rank has."""
        return self.num_experts

    @property
    def num_computed(self) -> float:
        """Of how many experts a rank computes what the tokens of a micro-batch pass."""
        return self.num_experts

    @property
    def rows_per_token(self) -> int:
        """Rows that a rank has for each token: one of each expert that it passes."""
        return self.per_token

    @property
    def held_width(self) -> int:
        """Columns of all experts that a rank has together, the shared one included."""
        return self.num_held * self.ffn_hidden_size + self.shared_ffn_hidden_size

    @property
    def active_width(self) -> int:
        """Columns of the experts that a token passes, the shared one included."""
        return self.rows_per_token * self.ffn_hidden_size + self.shared_ffn_hidden_size

    @property
    def blocks_per_token(self) -> int:
        """Experts that a token passes, the shared one included."""
        return self.rows_per_token + bool(self.shared_ffn_hidden_size)

    def share_of_tokens(self, count: int) -> float:
        """Of all tokens those that pass one of `count` experts at least, where routing is even."""
        missed = math.comb(self.num_experts - count, self.per_token)
        return 1 - missed / math.comb(self.num_experts, self.per_token)

    def router_parameters(self, hidden_size: int) -> int:
        """Elements of the router's matrix and of the gate of the shared expert."""
        return hidden_size * (self.num_experts + self.has_shared_gate)

    def flags(self) -> tuple[dict[str, int | str], tuple[str, ...]]:
        """Return Megatron's flags of them: with values, and switches."""
        valued: dict[str, int | str] = {
            "--num-experts": self.num_experts,
            "--moe-router-topk": self.per_token,
            "--moe-ffn-hidden-size": self.ffn_hidden_size,
            "--moe-token-dispatcher-type": "alltoall",
        }
        if self.shared_ffn_hidden_size:
            valued[SHARED_EXPERT_FLAG] = self.shared_ffn_hidden_size
        gate = ("--moe-shared-expert-gate",) if self.has_shared_gate else ()
        return valued, (*gate, *(("--moe-router-pre-softmax",) if self.scores_all else ()))


@dataclass(frozen=True, kw_only=True)
class ExpertsOfRank(Experts):
    """The experts of a layer, of which a rank has some."""

    held: int
    computed: float | None = None
    """How many get as many rows in the mean as the rank computes; None: routing is even."""
    are_sent_tokens: bool = False
    """Whether ranks have tokens of their own and exchange them, so that each computes as many rows
    as with all experts: stock's expert parallelism. Else, in a TP group, all have the same."""

    @property
    def num_held(self) -> int:
        """See `Experts`."""
        return self.held

    @property
    def num_computed(self) -> float:
        """See `Experts`."""
        if self.computed is not None:
            return self.computed
        return self.num_experts if self.are_sent_tokens else self.held

    @property
    def rows_per_token(self) -> int:
        """See `Experts`. Of those that are sent, a rank without experts gets none."""
        return 0 if self.are_sent_tokens and not self.held else self.per_token


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values come from one narrow vector of a token (DeepSeek-AI 2024,
    arXiv 2405.04434), by Megatron's names."""

    kv_lora_rank: Positive
    """Width of that vector."""
    q_lora_rank: Count = 0
    """The same of queries; 0: they come from the residual stream."""
    qk_head_dim: Positive
    """Of a query's and a key's head, without position."""
    qk_pos_emb_head_dim: Positive
    """Rotated elements of a head; of keys, all heads have the same."""
    v_head_dim: Positive
    """Of a value's head."""

    @property
    def query_dim(self) -> int:
        """Of a whole head of a query or a key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def down_width(self) -> int:
        """Output elements of the matrices that read the residual stream, for keys and values, and
        for queries where these have a rank."""
        return self.kv_lora_rank + self.qk_pos_emb_head_dim + self.q_lora_rank

    @property
    def ranks(self) -> int:
        """Input elements of the matrices that make heads of that."""
        return self.kv_lora_rank + self.q_lora_rank

    def flags(self) -> dict[str, int | str]:
        """Return Megatron's flags with values, beside `--multi-latent-attention`."""
        names = [each.name for each in dataclasses.fields(self) if getattr(self, each.name)]
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of equal layers, or of two kinds, as far as time and memory depend on it; in
    profiles, too."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1)]
    """What entries of a profile refer to."""
    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the feed-forward block."""
    num_attention_heads: Positive
    """Query heads."""
    num_query_groups: Positive
    """Key and value heads."""
    kv_channels: Positive
    """Width of one head."""
    vocab_size: Positive
    """Rows of the embedding table, padding included."""
    seq_length: Positive
    """Tokens per sample."""
    tied_embeddings: bool = False
    """Whether embedding and output layer share one table."""
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    position_embedding: PositionEmbedding = "rope"
    max_positions: Count = 0
    """Rows of the learned position table; 0 without one."""
    linear_bias: bool = True
    """Biases in all linear layers of the transformer block."""
    qkv_bias: bool = False
    """With linear_bias off: biases of query, key and value still."""
    qk_norm: bool = False
    """Norms of query and key heads."""
    experts: Experts | None = None
    """Those of each layer; None: every layer has one feed-forward block."""
    latent: LatentAttention | None = None
    """None: attention has keys and values of its own heads."""
    dense_layers: tuple[Count, ...] = ()
    """Numbers of layers that have a feed-forward block all the same, in ascending order."""

    @property
    def dense(self) -> "ModelShape":
        """A model of such layers alone."""
        return dataclasses.replace(self, experts=None, dense_layers=())

    def of_layer(self, layer: int) -> "ModelShape":
        """A model whose layers are all like this one."""
        return self.dense if layer in self.dense_layers else self

    @property
    def moe_layer_freq(self) -> tuple[Literal[0, 1], ...] | None:
        """Layer -> whether it has experts, where there are layers of two kinds."""
        if self.experts is None or not self.dense_layers:
            return None
        return tuple(0 if n in self.dense_layers else 1 for n in range(self.num_layers))

    @property
    def is_gated(self) -> bool:
        """Whether the first feed-forward matrix has a gate beside it."""
        return self.activation in ("swiglu", "geglu")

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token."""
        head = self.kv_channels if self.latent is None else self.latent.query_dim
        return self.num_attention_heads * head

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token."""
        if self.latent is not None:
            return self.query_width
        return self.num_query_groups * self.kv_channels

    @property
    def value_width(self) -> int:
        """Elements of all values of a token."""
        if self.latent is not None:
            return self.num_attention_heads * self.latent.v_head_dim
        return self.num_query_groups * self.kv_channels

    @property
    def key_value_width(self) -> int:
        """Elements of all keys and values of a token."""
        return self.key_width + self.value_width

    @property
    def context_width(self) -> int:
        """What attention returns for a token: a value for each query head."""
        return self.value_width if self.latent is not None else self.query_width

    @property
    def projected_width(self) -> int:
        """Output elements of the matrices that make heads: of latent attention all but the rotated
        elements of keys."""
        if self.latent is None:
            return self.query_width + self.key_value_width
        rotated = self.num_attention_heads * self.latent.qk_pos_emb_head_dim
        return self.query_width + self.key_value_width - rotated

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
        if self.experts is None:
            return (self._attention_matrices + feed_forward) // tensor_parallel
        # As many experts of each token as there are of all.
        feed_forward = int(feed_forward * self.experts.num_computed / self.experts.num_experts)
        return self._attention_matrices // tensor_parallel + feed_forward + self._router

    def layer_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of one transformer layer on each rank, those of all its experts included."""
        matrices, biases = self._attention_matrices, 0
        whole = 2 * self.norm_parameters
        if self.latent is None and (self.linear_bias or self.qkv_bias):
            biases += self.query_width + self.key_value_width
        if self.linear_bias:
            whole += self.hidden_size  # after attention
        if self.qk_norm:
            normed = 2 * self.kv_channels if self.latent is None else self.latent.ranks
            whole += normed * self._norm_vectors
        if self.experts is None:
            matrices += self.hidden_size * (self.ffn_input_width + self.ffn_width)
            biases += self.ffn_input_width * self.linear_bias
            whole += self.hidden_size * self.linear_bias  # after the feed-forward block
        else:
            whole += self._router + self.experts.num_experts * self.linear_bias  # of the router
            whole += self.expert_parameters
        return matrices // tensor_parallel + biases // tensor_parallel + whole

    @property
    def expert_parameters(self) -> int:
        """Those of all experts of a layer that a rank has, the shared one included; 0 without."""
        if self.experts is None:
            return 0
        first_matrices = 2 if self.is_gated else 1
        matrices = self.hidden_size * self.experts.held_width * (first_matrices + 1)
        biases = first_matrices * self.experts.ffn_hidden_size + self.hidden_size
        return matrices + self.experts.num_held * biases * self.linear_bias

    @property
    def _attention_matrices(self) -> int:
        hidden, latent = self.hidden_size, self.latent
        if latent is None:
            return hidden * (self.projected_width + self.context_width)
        of_queries = (latent.q_lora_rank or hidden) * self.query_width
        of_others = latent.kv_lora_rank * (self.projected_width - self.query_width)
        return hidden * (latent.down_width + self.context_width) + of_queries + of_others

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
        """Those of one layer that replicas cut by columns of the MLP, or into experts; of a shared
        expert each rank has the whole."""
        if self.experts is not None:
            shared = self.experts.shared_ffn_hidden_size * (3 if self.is_gated else 2)
            return self.expert_parameters - self.hidden_size * shared
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
        layers = (self.num_layers - len(self.dense_layers)) * self.layer_parameters()
        layers += len(self.dense_layers) * self.dense.layer_parameters()
        return self.embedding_parameters() + layers + self.head_parameters()

    def fingerprint(self, lora: Lora | None = None) -> ModelFingerprint:
        """Return what a plan says about the model that it was made for, and its adapters."""
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
            lora=str(lora) if lora else None,
            num_experts=experts.num_experts if experts else None,
            moe_router_topk=experts.per_token if experts else None,
            moe_ffn_hidden_size=experts.ffn_hidden_size if experts else None,
            moe_layer_freq=self.moe_layer_freq,
        )

    def flags(self) -> tuple[dict[str, int | str], list[str]] | None:
        """Return Megatron's flags of it: with values, and switches; None where it has none."""
        activations = {
            "gelu": [],
            "swiglu": ["--swiglu"],
            "squared_relu": ["--squared-relu", "--no-bias-gelu-fusion"],
        }
        if self.activation not in activations:
            return None
        position = self.position_embedding
        valued: dict[str, int | str] = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.hidden_size,
            "--ffn-hidden-size": self.ffn_hidden_size,
            "--num-attention-heads": self.num_attention_heads,
            "--seq-length": self.seq_length,
            "--max-position-embeddings": self.max_positions or self.seq_length,
            "--position-embedding-type": _POSITION_FLAGS.get(position, position),
            "--normalization": "RMSNorm" if self.norm == "rmsnorm" else "LayerNorm",
            "--vocab-size": self.vocab_size,
        }
        if self.latent is not None:
            valued |= self.latent.flags()
        elif self.kv_channels != max(1, self.hidden_size // self.num_attention_heads):
            valued["--kv-channels"] = self.kv_channels
        if self.vocab_size % USUAL_DIVISOR:
            valued["--make-vocab-size-divisible-by"] = 1
        switches = activations[self.activation]
        if self.experts is not None:
            of_experts, more = self.experts.flags()
            valued |= of_experts
            switches += more
        if self.moe_layer_freq is not None:
            runs = [(kind, len(list(same))) for kind, same in groupby(self.moe_layer_freq)]
            valued["--moe-layer-freq"] = "+".join(f"[{kind}]*{count}" for kind, count in runs)
        switches += [LATENT_FLAG] * (self.latent is not None)
        if self.num_query_groups != self.num_attention_heads:
            switches.append("--group-query-attention")
            valued["--num-query-groups"] = self.num_query_groups
        switches += ["--disable-bias-linear"] * (not self.linear_bias)
        switches += ["--add-qkv-bias"] * self.qkv_bias + ["--qk-layernorm"] * self.qk_norm
        switches += ["--untie-embeddings-and-output-weights"] * (not self.tied_embeddings)
        return valued, switches


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


def flags_of_shape(shape: ModelShape) -> tuple[str, ...]:
    """Return Megatron's flags of a model as words; empty where it has none, as for ReLU."""
    valued, switches = shape.flags() or ({}, [])
    return (*(str(word) for pair in valued.items() for word in pair), *switches)


def padded_vocab_size(
    size: int, *, divisible_by: int = USUAL_DIVISOR, tensor_parallel: int = 1
) -> int:
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


def _known(
    name: str,
    *,
    also: str | None = None,
    experts: dict[str, Any] | None = None,
    latent: dict[str, int] | None = None,
    dense_layers: list[int] | None = None,
    **entry: Any,
) -> ModelShape:
    """Make a model of an entry; `also`: another name of it, for `canonical_model`."""
    return ModelShape(
        name=name,
        experts=None if experts is None else Experts(**experts),
        latent=None if latent is None else LatentAttention(**latent),
        dense_layers=tuple(dense_layers or ()),
        **entry,
    )


_KNOWN = read_table(__package__, "models.yaml")["models"]
MODELS: dict[str, ModelShape] = {name: _known(name, **entry) for name, entry in _KNOWN.items()}
"""Well-known models, and those of published measurements."""
_ALIASES = {entry["also"]: name for name, entry in _KNOWN.items() if "also" in entry}


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
    """Sizes of micro-batches are multiples of it: auxiliary losses are of so many samples."""
    needs_loads_in_order: bool = False
    """Whether a backward needs what experts got of all earlier samples of the step."""
    are_packed: bool = False
    """Whether the samples of a micro-batch are one sequence."""
    has_auxiliary_loss: bool = False
    """Whether routers have a loss that balances their experts."""
    router_bytes: int = 0
    """Of a score of an expert, where the command says its type; 0: as all activations."""
    lora: Lora | None = None
    """The adapters, where these alone are trained; None: all weights are."""


USUAL = Computing(attention="flash")
"""How a model without a command computes: no dropout, attention keeps no scores."""
