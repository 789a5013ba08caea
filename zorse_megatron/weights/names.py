"""Which tensors of a Hugging Face model make up which of Megatron's, and how they are laid out.

One table for Llama, Mistral, Qwen2 and Qwen3, whose names are the same; biases and norms of heads
follow from the shape. Megatron's names are those of its checkpoints, in which the tensors of all
layers are stacked. Sources: `SelfAttention.get_query_key_value_tensors` in Megatron-Core for heads,
`MLP` for the gate, and the modelling files of transformers for the other names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.inputs.lora import MODULE, Lora, Target
from zorse_megatron.inputs.model import ModelShape

TABLE = "embedding.word_embeddings.weight"
_LAYERS = "decoder.layers."
"""In the keys of adapters' tensors, and in no others."""
MODULES: Mapping[Target, str] = {
    **{"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    **{"o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": "mlp.down_proj",
}
"""Names of the matrices in layers of Hugging Face's."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of the Hugging Face model."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WholeTensor:
    """A tensor of Megatron's, and the parts of which its rows consist.

    Rows come in `groups` of equal size, each with a share of every part in turn: for attention a
    group is the query heads of one key and value head, then its key, then its value.
    """

    key: str
    parts: tuple[Part, ...]
    layer: int | None = None
    """None: not in a layer."""
    num_layers: int = 1
    groups: int = 1
    is_padded: bool = False
    """Whether Megatron may have more rows, which stand for no token."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of it in one layer."""
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])

    @property
    def key_of_layer(self) -> str:
        """Its key in a checkpoint that does not stack layers."""
        return self.key.replace(_LAYERS, f"{_LAYERS}{self.layer}.", 1)

    @property
    def num_elements(self) -> int:
        """Elements of all its parts."""
        return math.prod(self.shape)


def whole_tensors(shape: ModelShape, vocab_size: int) -> Iterator[WholeTensor]:
    """Yield all tensors of a model. `vocab_size`: rows of its table in the Hugging Face model."""
    hidden = shape.hidden_size
    table = (vocab_size, hidden)
    yield _single(TABLE, "model.embed_tokens.weight", table, is_padded=True)
    for layer in range(shape.num_layers):
        yield from _layer(shape, layer)
    yield _single("decoder.final_layernorm.weight", "model.norm.weight", (hidden,))
    if not shape.tied_embeddings:
        yield _single("output_layer.weight", "lm_head.weight", table, is_padded=True)


def adapter_tensors(lora: Lora, shape: ModelShape) -> Iterator[WholeTensor]:
    """Yield the tensors of a model's adapters; their parts have the names of the peft library."""
    for layer in range(shape.num_layers):
        for target, size in lora.sizes(shape).items():
            room = "self_attention" if size.in_attention else "mlp"
            names = names_of_adapter(f"model.layers.{layer}.{MODULES[target]}.weight")
            shapes = (lora.rank, size.inputs), (size.outputs, lora.rank)
            for side, name, whole in zip("ab", names, shapes, strict=True):
                yield WholeTensor(
                    key=f"{_LAYERS}{room}{MODULE}{target}.{side}",
                    parts=(Part(name=name, shape=whole),),
                    layer=layer,
                    num_layers=shape.num_layers,
                )


def names_of_adapter(weight: str) -> tuple[str, str]:
    """Return the names of A and B of a matrix: `model.layers.0.self_attn.q_proj.weight`."""
    module = "base_model.model." + weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class StatefulModule:
    """A module that has an entry `_extra_state` in a checkpoint, which says nothing without fp8."""

    name: str
    layers: int = 1
    """How many layers have one."""
    is_norm: bool = False


def stateful_modules(shape: ModelShape) -> Sequence[StatefulModule]:
    """Return those that Megatron's own layers, or Transformer Engine's, ask a checkpoint for.

    The former ask for linear layers alone; what nobody asks for does no harm.
    """
    linear = ["self_attention.linear_proj", "self_attention.linear_qkv"]
    linear += ["mlp.linear_fc1", "mlp.linear_fc2", "self_attention.core_attention"]
    norms = [f"self_attention.{each}_layernorm" for each in "qk"] * shape.qk_norm
    in_layers = [
        StatefulModule(name=_LAYERS + name, layers=shape.num_layers, is_norm=name in norms)
        for name in (*linear, *norms)
    ]
    return [*in_layers, StatefulModule(name="decoder.final_layernorm", is_norm=True)]


def _single(key: str, name: str, shape: tuple[int, ...], *, is_padded: bool = False) -> WholeTensor:
    return WholeTensor(key=key, parts=(Part(name=name, shape=shape),), is_padded=is_padded)


def _layer(shape: ModelShape, layer: int) -> Iterator[WholeTensor]:
    """Yield the tensors of one layer."""
    hidden, ffn, head = shape.hidden_size, shape.ffn_hidden_size, shape.kv_channels
    query, key_or_value = shape.query_width, shape.num_query_groups * head

    def tensor(
        key: str, names: Sequence[str], rows: Sequence[int], *columns: int, groups: int = 1
    ) -> WholeTensor:
        parts = tuple(
            Part(name=f"model.layers.{layer}.{name}", shape=(count, *columns))
            for name, count in zip(names, rows, strict=True)
        )
        return WholeTensor(
            key=_LAYERS + key,
            parts=parts,
            layer=layer,
            num_layers=shape.num_layers,
            groups=groups,
        )

    def linear(
        key: str,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        bias: bool,
        groups: int,
    ) -> Iterator[WholeTensor]:
        weights = [f"{name}.weight" for name in names]
        yield tensor(f"{key}.weight", weights, rows, columns, groups=groups)
        if bias:
            biases = [f"{name}.bias" for name in names]
            yield tensor(f"{key}.bias", biases, rows, groups=groups)

    heads = [f"self_attn.{each}_proj" for each in "qkv"]
    widths = (query, key_or_value, key_or_value)
    attention, mlp = "self_attention.linear_", "mlp.linear_"
    all_biased = shape.linear_bias
    yield tensor(f"{attention}qkv.layer_norm_weight", ["input_layernorm.weight"], [hidden])
    yield from linear(
        f"{attention}qkv", heads, widths, hidden,
        bias=all_biased or shape.qkv_bias, groups=shape.num_query_groups,
    )  # fmt: skip
    if shape.qk_norm:
        for each in "qk":
            name = f"self_attention.{each}_layernorm.weight"
            yield tensor(name, [f"self_attn.{each}_norm.weight"], [head])
    names = ["self_attn.o_proj"]
    yield from linear(f"{attention}proj", names, [hidden], query, bias=all_biased, groups=1)
    yield tensor(f"{mlp}fc1.layer_norm_weight", ["post_attention_layernorm.weight"], [hidden])
    names = ["mlp.gate_proj", "mlp.up_proj"]
    yield from linear(f"{mlp}fc1", names, [ffn, ffn], hidden, bias=all_biased, groups=1)
    yield from linear(f"{mlp}fc2", ["mlp.down_proj"], [hidden], ffn, bias=all_biased, groups=1)
