"""The model: its shape, and how many parameters that makes.

Counts are those of Megatron-Core's GPT: fused QKV and (gated) feed-forward layers, norms before
attention, before the feed-forward block and at the end. `tensor_parallel` ranks split the matrices
and the biases that follow their columns; norms and the other biases are on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.errors import Problem
from zorse_megatron.schema.plan.plan import ModelFingerprint

Activation = Literal["gelu", "relu", "squared_relu", "swiglu", "geglu"]
Norm = Literal["layernorm", "rmsnorm"]
PositionEmbedding = Literal["learned", "rope", "none"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense decoder, as far as time and memory depend on it."""

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
    def ffn_input_width(self) -> int:
        """Output elements of the first feed-forward matrix for a token."""
        return self.ffn_hidden_size * (2 if self.is_gated else 1)

    def layer_matrix_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of the matrices of one layer on each rank: what costs time per token."""
        attention = self.hidden_size * (2 * self.query_width + self.key_value_width)
        feed_forward = self.hidden_size * (self.ffn_input_width + self.ffn_hidden_size)
        return (attention + feed_forward) // tensor_parallel

    def layer_parameters(self, tensor_parallel: int = 1) -> int:
        """Parameters of one transformer layer on each rank."""
        split = whole = 0
        if self.linear_bias or self.qkv_bias:
            split += self.query_width + self.key_value_width
        if self.linear_bias:
            split += self.ffn_input_width
            whole += 2 * self.hidden_size  # after attention and after the feed-forward block
        if self.qk_norm:
            whole += 2 * self.kv_channels * self._norm_vectors
        whole += 2 * self.norm_parameters
        return self.layer_matrix_parameters(tensor_parallel) + split // tensor_parallel + whole

    @property
    def attention_parameters(self) -> int:
        """Those of one layer that sets cut by KV groups."""
        matrices = self.hidden_size * (2 * self.query_width + self.key_value_width)
        has_bias = self.linear_bias or self.qkv_bias
        return matrices + (self.query_width + self.key_value_width if has_bias else 0)

    @property
    def mlp_parameters(self) -> int:
        """Those of one layer that sets cut by columns of the MLP."""
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
        return ModelFingerprint(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            seq_length=self.seq_length,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
        )


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
