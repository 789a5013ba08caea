"""Activations that a transformer layer keeps for its backward, tensor by tensor.

The list is that of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with the widths of
grouped queries and gated feed-forward layers in place of theirs, and flash attention (Dao et al.
2022) as an alternative: it keeps one number per head and token in place of the score matrix. For
their GPT the sum is their 34 s b h + 5 a s^2 b bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.schema.gpus.gpu import Attention
from zorse_megatron.schema.model.computing import Module
from zorse_megatron.schema.model.model_shape import ModelShape

_MASK_BYTES = 1
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One tensor that is kept, for one sample."""

    name: str
    elements: int
    element_bytes: int
    is_split: bool
    """Whether tensor-parallel ranks hold a part each; the others are whole on every rank, or split
    by sequence parallelism."""
    module: Module | None = None
    """What to recompute so that it need not be kept; None: a part that is kept but by full
    recomputation."""


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """How a model's layers are computed, as far as it changes what is kept."""

    model: ModelShape
    element_bytes: int
    attention: Attention = "flash"
    hidden_dropout: bool = False
    attention_dropout: bool = False
    softmax_in_fp32: bool = False
    """Whether unfused attention keeps its softmax in fp32, and 16-bit probabilities beside it."""
    modules: tuple[Module, ...] = ("core_attn",)
    """What selective recomputation recomputes."""

    def saved(self) -> Iterator[Saved]:
        """Yield every tensor that one layer keeps for one sample."""
        model = self.model
        hidden, tokens = model.hidden_size, model.seq_length
        yield self._whole("input of the norm before attention", hidden)
        yield self._whole("input of query, key and value", hidden, "layernorm")
        yield self._split("query, key and value", model.query_width + model.key_value_width)
        yield from self._scores(model.num_attention_heads * tokens)
        yield self._split("input of the projection", model.query_width)
        if self.hidden_dropout:
            yield self._mask("dropout mask after attention", hidden)
        yield self._whole("input of the norm before the feed-forward block", hidden)
        yield self._whole("input of the first matrix", hidden, "layernorm")
        if model.activation != "relu":  # its gradient follows from its output
            yield self._split("input of the activation", model.ffn_input_width, "mlp")
        yield self._split("input of the second matrix", model.ffn_hidden_size, "mlp")
        if self.hidden_dropout:
            yield self._mask("dropout mask after the feed-forward block", hidden)

    def bytes_per_sample(
        self, mode: RecomputeMode, *, tensor_parallel: int = 1, sequence_parallel: bool = False
    ) -> int:
        """Return what one layer keeps of one sample on each rank."""
        return sum(
            self.tensor_bytes(
                mode, tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel
            )
        )

    def tensor_bytes(
        self, mode: RecomputeMode, *, tensor_parallel: int = 1, sequence_parallel: bool = False
    ) -> tuple[int, ...]:
        """Return the bytes of each tensor that one layer keeps of one sample on each rank."""
        whole = tensor_parallel if sequence_parallel else 1
        found = []
        for tensor in self.saved():
            if mode == "full" and tensor.name != "input of the norm before attention":
                continue
            if mode == "selective" and tensor.module in self.modules:
                continue
            ranks = tensor_parallel if tensor.is_split else whole
            found.append(-(-tensor.elements // ranks) * tensor.element_bytes)
        return tuple(found)

    def _scores(self, rows: int) -> Iterator[Saved]:
        """What core attention keeps; `rows` is the number of rows of all score matrices."""
        if self.attention == "flash":
            yield Saved(
                name="sums of the softmax",
                elements=rows,
                element_bytes=_FLOAT32_BYTES,
                is_split=True,
                module="core_attn",
            )
            return
        elements = rows * self.model.seq_length
        is_wide = self.softmax_in_fp32 and self.element_bytes < _FLOAT32_BYTES
        names = {"softmax": _FLOAT32_BYTES if is_wide else self.element_bytes}
        if self.attention_dropout:
            names |= {"dropout mask of the softmax": _MASK_BYTES, "its output": self.element_bytes}
        elif is_wide:
            names |= {"probabilities": self.element_bytes}
        for name, element_bytes in names.items():
            yield Saved(
                name=name,
                elements=elements,
                element_bytes=element_bytes,
                is_split=True,
                module="core_attn",
            )

    def _whole(self, name: str, width: int, module: Module | None = None) -> Saved:
        return self._tensor(name, width, self.element_bytes, is_split=False, module=module)

    def _split(self, name: str, width: int, module: Module | None = None) -> Saved:
        return self._tensor(name, width, self.element_bytes, is_split=True, module=module)

    def _mask(self, name: str, width: int) -> Saved:
        return self._tensor(name, width, _MASK_BYTES, is_split=False)

    def _tensor(
        self,
        name: str,
        width: int,
        element_bytes: int,
        *,
        is_split: bool,
        module: Module | None = None,
    ) -> Saved:
        return Saved(
            name=name,
            elements=self.model.seq_length * width,
            element_bytes=element_bytes,
            is_split=is_split,
            module=module,
        )


def delayed_elements(
    model: ModelShape, *, tensor_parallel: int = 1, splits_inputs: bool = False
) -> int:
    """Return what gradients of a layer's four matrices are computed from, for one sample.

    That is the inputs of the matrices, and the gradients of their outputs. `splits_inputs`: with
    sequence parallelism Megatron's own layers keep their part of the sequence of the inputs of the
    first matrix of each block; Transformer Engine's keep what they have gathered. The gradients of
    the outputs of the second are whole on every rank.
    """
    hidden = model.hidden_size
    ranks = tensor_parallel if splits_inputs else 1
    split = model.query_width + model.ffn_hidden_size  # inputs of the second matrices
    split += model.query_width + model.key_value_width + model.ffn_input_width
    per_token = 2 * hidden + -(-2 * hidden // ranks) + -(-split // tensor_parallel)
    return model.seq_length * per_token
