"""Which tensors of a Hugging Face model make up which of Megatron's, and how they are laid out.

One table for Llama, Mistral, Qwen2 and Qwen3, whose names are the same; biases and norms of heads
follow from the shape, and experts have names by family. Megatron's names are those of its
checkpoints, in which the tensors of all layers are stacked, and those of all experts of a layer.
Sources: `SelfAttention.get_query_key_value_tensors` in Megatron-Core for heads, `MLP` for the gate,
`SequentialMLP.sharded_state_dict` for experts, and the modelling files of transformers for the
other names; files have those of experts as it maps them when it saves.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zorse_megatron.inputs.lora import MODULE, Lora, Target
from zorse_megatron.inputs.model import Experts, ModelShape

TABLE = "embedding.word_embeddings.weight"
_LAYERS = "decoder.layers."
_ATTENTION = "self_attention.linear_"
_MLP_NORM = "mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight",)
"""Key and name; before experts, too, in Megatron's own layers."""
MODULES: Mapping[Target, str] = {
    **{"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    **{"o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": "mlp.down_proj",
}
"""Names of the matrices in layers of Hugging Face's."""


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """Names of what a layer of Hugging Face's has in place of a feed-forward block."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


EXPERTS: Mapping[str, ExpertNames] = {
    "mixtral": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
}
"""`model_type` -> names; those of all others are Qwen's."""


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
    expert: int | None = None
    """None: no expert's."""
    num_experts: int = 1
    groups: int = 1
    is_padded: bool = False
    """Whether Megatron may have more rows, which stand for no token."""
    engine_key: str | None = None
    """Its key where Transformer Engine's layers have another one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of it in one layer, and of one expert."""
        rows = sum(part.shape[0] for part in self.parts)
        return (rows, *self.parts[0].shape[1:])

    @property
    def stack(self) -> dict[str, int]:
        """The axes in which a checkpoint stacks such tensors, before their own, and their sizes."""
        layers = {} if self.layer is None else {"layers": self.num_layers}
        return layers if self.expert is None else layers | {"experts": self.num_experts}

    @property
    def place(self) -> tuple[int, ...]:
        """Where it is in these axes."""
        return tuple(each for each in (self.layer, self.expert) if each is not None)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it may have in a checkpoint that stacks layers."""
        return (self.key,) if self.engine_key is None else (self.key, self.engine_key)

    @property
    def keys_of_layer(self) -> tuple[str, ...]:
        """The same in one that does not."""
        return tuple(key.replace(_LAYERS, f"{_LAYERS}{self.layer}.", 1) for key in self.keys)

    @property
    def num_elements(self) -> int:
        """Elements of all its parts."""
        return math.prod(self.shape)


def whole_tensors(
    shape: ModelShape, vocab_size: int, experts: ExpertNames | None = None
) -> Iterator[WholeTensor]:
    """Yield all tensors of a model. `vocab_size`: rows of its table in the Hugging Face model."""
    hidden = shape.hidden_size
    table = (vocab_size, hidden)
    yield _single(TABLE, "model.embed_tokens.weight", table, is_padded=True)
    for number in range(shape.num_layers):
        layer = _Layer(shape=shape, number=number)
        yield from layer.attention()
        yield from (
            layer.dense()
            if shape.experts is None
            else layer.experts(shape.experts, experts or ExpertNames())
        )
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
    stack: tuple[int, ...] = (1,)
    """How many there are: layers that have one, experts of a layer."""
    is_norm: bool = False


def stateful_modules(shape: ModelShape) -> Sequence[StatefulModule]:
    """Return those that Megatron's own layers, or Transformer Engine's, ask a checkpoint for.

    The former ask for linear layers alone; what nobody asks for does no harm.
    """
    experts = shape.experts
    layers: tuple[int, ...] = (shape.num_layers,)
    attention = ["linear_proj", "linear_qkv", "core_attention"]
    norms = [f"{each}_layernorm" for each in "qk"] * shape.qk_norm
    modules = {f"self_attention.{each}": layers for each in (*attention, *norms)}
    rooms = {"mlp": layers}
    if experts is not None:
        rooms = {"mlp.experts.experts": (*layers, experts.num_experts)}
        rooms |= {"mlp.shared_experts": layers} if experts.shared_ffn_hidden_size else {}
    for room, stack in rooms.items():
        modules |= {f"{room}.linear_fc1": stack, f"{room}.linear_fc2": stack}
    in_layers = [
        StatefulModule(name=_LAYERS + name, stack=stack, is_norm=name.endswith("_layernorm"))
        for name, stack in modules.items()
    ]
    return [*in_layers, StatefulModule(name="decoder.final_layernorm", is_norm=True)]


def _single(key: str, name: str, shape: tuple[int, ...], *, is_padded: bool = False) -> WholeTensor:
    return WholeTensor(key=key, parts=(Part(name=name, shape=shape),), is_padded=is_padded)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """A layer, and the tensors of its blocks."""

    shape: ModelShape
    number: int

    def attention(self) -> Iterator[WholeTensor]:
        """Yield those of attention, and of the norm before it."""
        shape, hidden, head = self.shape, self.shape.hidden_size, self.shape.kv_channels
        key_or_value = shape.num_query_groups * head
        widths = (shape.query_width, key_or_value, key_or_value)
        yield self._tensor(
            f"{_ATTENTION}qkv.layer_norm_weight", ["input_layernorm.weight"], [hidden]
        )
        yield from self._linear(
            f"{_ATTENTION}qkv", [f"self_attn.{each}_proj" for each in "qkv"], widths, hidden,
            bias=shape.linear_bias or shape.qkv_bias, groups=shape.num_query_groups,
        )  # fmt: skip
        if shape.qk_norm:
            for each in "qk":
                name = f"self_attention.{each}_layernorm.weight"
                yield self._tensor(name, [f"self_attn.{each}_norm.weight"], [head])
        names, rows = ["self_attn.o_proj"], [hidden]
        yield from self._linear(f"{_ATTENTION}proj", names, rows, shape.query_width)

    def dense(self) -> Iterator[WholeTensor]:
        """Yield those of a feed-forward block, and of the norm before it."""
        yield self._tensor(*_MLP_NORM, [self.shape.hidden_size])
        yield from self._block("mlp", "mlp", ExpertNames(), self.shape.ffn_hidden_size)

    def experts(self, experts: Experts, names: ExpertNames) -> Iterator[WholeTensor]:
        """Yield those of router, experts and shared expert, and of the norm before them."""
        hidden, block = self.shape.hidden_size, names.block
        yield self._tensor(*_MLP_NORM, [hidden], engine_key="pre_mlp_layernorm.weight")
        router = [f"{block}.gate.weight"]
        yield self._tensor("mlp.router.weight", router, [experts.num_experts], hidden)
        for number in range(experts.num_experts):
            yield from self._block(
                "mlp.experts.experts", f"{block}.experts.{number}", names,
                experts.ffn_hidden_size, expert=number, num_experts=experts.num_experts,
            )  # fmt: skip
        if experts.shared_ffn_hidden_size:
            room = "mlp.shared_experts"
            width = experts.shared_ffn_hidden_size
            yield from self._block(room, f"{block}.shared_expert", names, width)
            if experts.has_shared_gate:
                gate = [f"{block}.shared_expert_gate.weight"]
                yield self._tensor(f"{room}.gate_weight", gate, [1], hidden)

    def _block(
        self, room: str, block: str, names: ExpertNames, width: int, **more: Any
    ) -> Iterator[WholeTensor]:
        """Yield the matrices of a feed-forward block. `room`: its name in Megatron."""
        hidden = self.shape.hidden_size
        inputs = [f"{block}.{names.gate}", f"{block}.{names.up}"]
        outputs = [f"{block}.{names.down}"]
        yield from self._linear(f"{room}.linear_fc1", inputs, [width, width], hidden, **more)
        yield from self._linear(f"{room}.linear_fc2", outputs, [hidden], width, **more)

    def _linear(
        self,
        key: str,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        bias: bool | None = None,
        **more: Any,
    ) -> Iterator[WholeTensor]:
        """`bias`: whether it has one; None: as all linear layers."""
        yield self._tensor(
            f"{key}.weight", [f"{name}.weight" for name in names], rows, columns, **more
        )
        if self.shape.linear_bias if bias is None else bias:
            yield self._tensor(f"{key}.bias", [f"{name}.bias" for name in names], rows, **more)

    def _tensor(
        self,
        key: str,
        names: Sequence[str],
        rows: Sequence[int],
        *columns: int,
        engine_key: str | None = None,
        **more: Any,
    ) -> WholeTensor:
        """`more`: fields of it."""
        parts = tuple(
            Part(name=f"model.layers.{self.number}.{name}", shape=(count, *columns))
            for name, count in zip(names, rows, strict=True)
        )
        return WholeTensor(
            key=_LAYERS + key,
            parts=parts,
            layer=self.number,
            num_layers=self.shape.num_layers,
            engine_key=None if engine_key is None else _LAYERS + engine_key,
            **more,
        )
