"""Which tensors of a Hugging Face model make up which of Megatron's, and how they are laid out.

One table for Llama, Mistral, Qwen2 and Qwen3, whose names are the same; biases, norms of heads and
latent attention follow from the shape, and experts have names by family. Megatron's names are those
of its checkpoints, in which the tensors of all layers are stacked, if these are alike, and those of
all experts of a layer. Sources: `SelfAttention.get_query_key_value_tensors` in Megatron-Core for
heads, `MLP` for the gate, `MLASelfAttention` for latent attention, `SequentialMLP` for experts, and
the modelling files of transformers for the other names; files have those of experts as it maps them
when it saves.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zorse_megatron.inputs.lora import MODULE, Lora, Target
from zorse_megatron.inputs.model import Experts, LatentAttention, ModelShape

TABLE = "embedding.word_embeddings.weight"
_LAYERS = "decoder.layers."
_ATTENTION = "self_attention.linear_"
_FUSED_NORM, _OWN_NORM = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
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
    shared: str = "shared_expert"
    bias: str | None = None
    """Of the experts' scores, where routers have some."""


EXPERTS: Mapping[str, ExpertNames] = {
    "mixtral": ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe"),
        ExpertNames(shared="shared_experts", bias="e_score_correction_bias"),
    ),
}
"""`model_type` -> names; those of all others are Qwen's."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor of the Hugging Face model."""

    name: str
    shape: tuple[int, ...]
    may_be_fp32: bool = False
    """Whether it may be in fp32 beside others that are not, as transformers keeps a router."""


@dataclass(frozen=True, kw_only=True)
class WholeTensor:
    """A tensor of Megatron's, and the parts of which its rows consist.

    Rows come in `groups` of equal size, each with a share of every part in turn: for attention a
    group is the query heads of one key and value head, then its key, then its value.
    """

    key: str
    parts: tuple[Part, ...]
    layer: int | None = None
    """Its place among the stacked ones; None: it is not stacked with those of other layers."""
    num_layers: int = 1
    expert: int | None = None
    """None: no expert's."""
    num_experts: int = 1
    groups: int = 1
    is_padded: bool = False
    """Whether Megatron may have more rows, which stand for no token."""
    other_key: str | None = None
    """Its key in layers of another kind: of Transformer Engine's, or of Megatron's own."""

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
        return (self.key,) if self.other_key is None else (self.key, self.other_key)

    @property
    def keys_of_layer(self) -> tuple[str, ...]:
        """The same in one that does not stack them."""
        if self.layer is None:
            return ()
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
        yield from (
            layer.attention() if shape.latent is None else layer.latent_attention(shape.latent)
        )
        yield from (
            layer.dense()
            if shape.experts is None or number in shape.dense_layers
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
    every = (
        [(_LAYERS, (shape.num_layers,), shape)]
        if not shape.dense_layers
        else [(f"{_LAYERS}{n}.", (), shape.of_layer(n)) for n in range(shape.num_layers)]
    )
    in_layers = [
        StatefulModule(
            name=prefix + name, stack=(*layers, *own) or (1,), is_norm=name.endswith("layernorm")
        )
        for prefix, layers, layer in every
        for name, own in _stateful_in_layer(layer).items()
    ]
    return [*in_layers, StatefulModule(name="decoder.final_layernorm", is_norm=True)]


def _stateful_in_layer(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> how many a layer of this shape has; () where it has one."""
    attention = [f"self_attention.{each}" for each in ("linear_proj", "core_attention")]
    if shape.latent is None:
        attention += ["self_attention.linear_qkv"]
        attention += [f"self_attention.{each}_layernorm" for each in "qk"] * shape.qk_norm
    else:
        linear = [f"{what}_{way}" for what in ("q", "kv") for way in ("down", "up")]
        attention += ["input_layernorm", *(f"{_ATTENTION}{each}_proj" for each in linear)]
    modules: dict[str, tuple[int, ...]] = dict.fromkeys(attention, ())
    rooms: dict[str, tuple[int, ...]] = {"mlp": ()}
    if experts := shape.experts:
        rooms = {"mlp.experts.experts": (experts.num_experts,)}
        rooms |= {"mlp.shared_experts": ()} if experts.shared_ffn_hidden_size else {}
        modules |= {"pre_mlp_layernorm": ()} if shape.latent else {}
    for room, stack in rooms.items():
        modules |= {f"{room}.linear_fc1": stack, f"{room}.linear_fc2": stack}
    return modules


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

    def latent_attention(self, latent: LatentAttention) -> Iterator[WholeTensor]:
        """The same of one whose keys and values come from one narrow vector.

        Megatron's layers for it are Transformer Engine's, which join norms and what follows.
        """
        hidden, heads = self.shape.hidden_size, self.shape.num_attention_heads
        yield self._tensor("input_layernorm.weight", ["input_layernorm.weight"], [hidden])
        queries = heads * latent.query_dim
        yield from self._narrowed("q", "q_a_proj", latent.q_lora_rank, 0, queries)
        values = heads * (latent.qk_head_dim + latent.v_head_dim)
        yield from self._narrowed(
            "kv", "kv_a_proj_with_mqa", latent.kv_lora_rank, latent.qk_pos_emb_head_dim, values
        )
        width = heads * latent.v_head_dim
        yield self._weight(f"{_ATTENTION}proj", "self_attn.o_proj", hidden, width)

    def _narrowed(
        self, what: str, down: str, rank: int, beside: int, rows: int
    ) -> Iterator[WholeTensor]:
        """Yield both matrices and the norm between. `beside`: what skips norm and second one."""
        room, hidden = f"{_ATTENTION}{what}", self.shape.hidden_size
        yield self._weight(f"{room}_down_proj", f"self_attn.{down}", rank + beside, hidden)
        yield self._tensor(
            f"{room}_up_proj.layer_norm_weight", [f"self_attn.{what}_a_layernorm.weight"], [rank],
            other_key=f"self_attention.{what}_layernorm.weight",
        )  # fmt: skip
        yield self._weight(f"{room}_up_proj", f"self_attn.{what}_b_proj", rows, rank)

    def _weight(self, key: str, name: str, rows: int, columns: int) -> WholeTensor:
        return self._tensor(f"{key}.weight", [f"{name}.weight"], [rows], columns)

    def _norm_of_mlp(self, *, is_apart: bool) -> WholeTensor:
        """`is_apart`: whether it has a key of its own, and not that of the layer after it."""
        keys = (_OWN_NORM, _FUSED_NORM) if is_apart else (_FUSED_NORM, _OWN_NORM)
        names = ["post_attention_layernorm.weight"]
        return self._tensor(keys[0], names, [self.shape.hidden_size], other_key=keys[1])

    def dense(self) -> Iterator[WholeTensor]:
        """Yield those of a feed-forward block, and of the norm before it."""
        yield self._norm_of_mlp(is_apart=False)
        yield from self._block("mlp", "mlp", ExpertNames(), self.shape.ffn_hidden_size)

    def experts(self, experts: Experts, names: ExpertNames) -> Iterator[WholeTensor]:
        """Yield those of router, experts and shared expert, and of the norm before them."""
        hidden, block = self.shape.hidden_size, names.block
        # Megatron's own layers call it as if it were joined; those for latent attention do not.
        yield self._norm_of_mlp(is_apart=self.shape.latent is not None)
        router, count = f"{block}.gate", [experts.num_experts]
        yield self._tensor(
            "mlp.router.weight", [f"{router}.weight"], count, hidden, may_be_fp32=True
        )
        if names.bias is not None:
            biases = [f"{router}.{names.bias}"]
            yield self._tensor("mlp.router.expert_bias", biases, count, may_be_fp32=True)
        for number in range(experts.num_experts):
            yield from self._block(
                "mlp.experts.experts", f"{block}.experts.{number}", names,
                experts.ffn_hidden_size, expert=number, num_experts=experts.num_experts,
            )  # fmt: skip
        if experts.shared_ffn_hidden_size:
            room = "mlp.shared_experts"
            width = experts.shared_ffn_hidden_size
            yield from self._block(room, f"{block}.{names.shared}", names, width)
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
        other_key: str | None = None,
        may_be_fp32: bool = False,
        **more: Any,
    ) -> WholeTensor:
        """`more`: fields of it."""
        is_stacked = not self.shape.dense_layers  # otherwise layers are not alike
        prefix = _LAYERS if is_stacked else f"{_LAYERS}{self.number}."
        parts = tuple(
            Part(
                name=f"model.layers.{self.number}.{name}",
                shape=(count, *columns),
                may_be_fp32=may_be_fp32,
            )
            for name, count in zip(names, rows, strict=True)
        )
        return WholeTensor(
            key=prefix + key,
            parts=parts,
            layer=self.number if is_stacked else None,
            num_layers=self.shape.num_layers,
            other_key=None if other_key is None else prefix + other_key,
            **more,
        )
