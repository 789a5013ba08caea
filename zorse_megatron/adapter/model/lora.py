"""LoRA in Megatron's layers: adapters beside frozen matrices, under any plan.

Each attention and each MLP gets a submodule `lora` with a module per target, of which `a`
[rank, inputs] and `b` [outputs, rank] are trained (`inputs.lora`). A forward hook adds their result
to that of Megatron's linear layer, which stays as it is; its weights are frozen, so Megatron
computes no gradient of them (`linear_with_frozen_weight`).

TP groups: where a layer's outputs are cut, B is, and A is whole on every rank; where its inputs
are, A is, and B is whole. What crosses the group is `rank` wide: A x, not x. With sequence
parallelism the whole one of the two sees a part of the sequence on each rank, and is marked for
`data_parallel.buckets.tp_sums_of`.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.parameter_parts import cut_axis, mark_unit
from zorse_megatron.errors import FlagError
from zorse_megatron.inputs.lora import LORA_FLAG, Lora, is_adapter

# Transformer Engine's layers, by name as it may not be installed; the first one has a norm inside.
_NORM_AND_COLUMN = "TELayerNormColumnParallelLinear"
_COLUMN, _ROW = "TEColumnParallelLinear", "TERowParallelLinear"


def add_adapters(model: Any, lora: Lora) -> None:
    """Freeze a chunk of a GPT, and give its layers adapters; before it is wrapped.

    Raises FlagError for layers of a kind that cannot have any.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    embedding = getattr(model, "embedding", None)
    if embedding is not None:
        # Recomputation and adapters behind frozen layers need an input with a gradient.
        embedding.register_forward_hook(_with_gradient)
    for layer in model.decoder.layers:
        _add(layer.self_attention, layer.self_attention.linear_qkv, lora, ("q", "k", "v"))
        _add(layer.self_attention, layer.self_attention.linear_proj, lora, ("o",))
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            # As stock's --freeze-all-layers: the model would change, and no checkpoint would tell.
            router.frozen_expert_bias = True
            continue
        first = ("gate", "up") if layer.mlp.config.gated_linear_unit else ("up",)
        _add(layer.mlp, layer.mlp.linear_fc1, lora, first)
        _add(layer.mlp, layer.mlp.linear_fc2, lora, ("down",))


def _with_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _add(block: Any, linear: Any, lora: Lora, parts: tuple[str, ...]) -> None:
    """Give one linear layer its adapters. `parts`: what its outputs are, in Megatron's order."""
    targets = [part for part in parts if part in lora.targets]
    if not targets:
        return
    if not hasattr(block, "lora"):
        block.lora = LayerAdapters()
    kind = type(linear).__name__
    if isinstance(linear, ColumnParallelLinear) or kind in (_NORM_AND_COLUMN, _COLUMN):
        shapes = _output_shapes(block, linear, parts)
        beside: Any = _BesideColumns(block.lora, linear, lora, shapes, targets)
    elif isinstance(linear, RowParallelLinear) or kind == _ROW:
        beside = _BesideRows(block.lora, linear, lora, targets[0])
    else:
        raise FlagError.of(
            "The model cannot have adapters",
            where=LORA_FLAG,
            found=f"a layer of class {kind}",
            expected="Megatron's own linear layers, or those of Transformer Engine",
            remedy="Use --transformer-impl local, or leave the flag out.",
        )
    for target in targets:
        mark_unit(block.lora[target], _unit(block, target))
    linear.register_forward_hook(beside)


def _unit(block: Any, target: str) -> int:
    """Elements of a KV group along the axis that TP groups cut; of an MLP a column."""
    if target in ("gate", "up", "down"):
        return 1
    width = int(block.hidden_size_per_attention_head)
    if target in ("k", "v"):
        return width
    heads, groups = block.num_attention_heads_per_partition, block.num_query_groups_per_partition
    return width * (int(heads) // int(groups))


def _output_shapes(block: Any, linear: Any, parts: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Part -> (units, elements of each) of this rank's outputs.

    Megatron's fused query, key and value alternate by KV group; gate and up come one after the
    other.
    """
    outputs = linear.weight.shape[0]
    if parts[0] != "q":
        return dict.fromkeys(parts, (1, outputs // len(parts)))
    widths = {part: _unit(block, part) for part in parts}
    groups = outputs // sum(widths.values())
    return {part: (groups, width) for part, width in widths.items()}


class LayerAdapters(torch.nn.ModuleDict):
    """The adapters of one attention or MLP, by target."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict | None = None
    ) -> dict:
        """As stock's modules: what checkpoints have of them."""
        axes = {
            name: axis
            for name, parameter in self.named_parameters()
            if (axis := cut_axis(parameter)) is not None
        }
        found: dict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=next(iter(self.values())).group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )
        return found


class _Adapter(torch.nn.Module):
    """A and B of one target, as far as this rank holds them; both are zero."""

    def __init__(self, linear: Any, *, inputs: int, outputs: int, rank: int, cut: str) -> None:
        super().__init__()
        self.group = _group_of(linear)
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.a = torch.nn.Parameter(torch.zeros(rank, inputs, **like))
        self.b = torch.nn.Parameter(torch.zeros(outputs, rank, **like))
        held, axis, whole = (self.b, 0, self.a) if cut == "outputs" else (self.a, 1, self.b)
        set_tensor_model_parallel_attributes(held, is_parallel=True, dim=axis, stride=1)
        if _splits_sequence(linear):
            whole.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B. Asked for by a call, for which a gather that is under way is waited for."""
        return self.a, self.b


def _group_of(linear: Any) -> Any:
    """The TP group, as Megatron's and Transformer Engine's layers have it."""
    return getattr(linear, "_tp_group", None) or linear.tp_group


def _splits_sequence(linear: Any) -> bool:
    return bool(linear.config.sequence_parallel) and _group_of(linear).size() > 1


class _BesideColumns:
    """Adds the adapters of a layer whose outputs TP groups cut: query, key, value; gate, up."""

    def __init__(
        self,
        adapters: LayerAdapters,
        linear: Any,
        lora: Lora,
        shapes: Mapping[str, tuple[int, int]],
        targets: Sequence[str],
    ) -> None:
        self.scale, self.shapes = lora.scale, shapes
        self.own: dict[str, _Adapter] = {}
        for target in targets:
            groups, width = shapes[target]
            self.own[target] = adapters[target] = _Adapter(
                linear,
                inputs=linear.weight.shape[1],
                outputs=groups * width,
                rank=lora.rank,
                cut="outputs",
            )

    def __call__(self, linear: Any, inputs: Any, output: Any) -> Any:
        """The hook; inputs [tokens, samples, width]."""
        factors = [adapter() for adapter in self.own.values()]
        normed = _normed(linear, inputs[0])
        # Not one product with all A in one: autograd would keep that copy for each micro-batch.
        narrow = [F.linear(normed, a) for a, _ in factors]
        if _group_of(linear).size() > 1:
            narrow = list(_across(linear, torch.cat(narrow, dim=-1)).chunk(len(narrow), dim=-1))
        results = {
            target: F.linear(part * self.scale, b)
            for target, (_, b), part in zip(self.own, factors, narrow, strict=True)
        }
        more = self._in_order(results, output[0])
        del results  # of the same size
        return _added(output, more)

    def _in_order(self, results: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The results as the layer has its outputs; zeros where a part has no adapter."""
        lead = like.shape[:-1]
        pieces = [
            results[part].view(*lead, *shape)
            if part in results
            else like.new_zeros(()).expand(*lead, *shape)
            for part, shape in self.shapes.items()
        ]
        return torch.cat(pieces, dim=-1)


def _across(linear: Any, narrow: torch.Tensor) -> torch.Tensor:
    """A x as all ranks of the TP group need it."""
    if linear.config.sequence_parallel:
        return gather_from_sequence_parallel_region(narrow, group=_group_of(linear))
    return copy_to_tensor_model_parallel_region(narrow, group=_group_of(linear))


class _BesideRows:
    """Adds the adapter of a layer whose inputs TP groups cut: o; down."""

    def __init__(self, adapters: LayerAdapters, linear: Any, lora: Lora, target: str) -> None:
        self.scale = lora.scale
        self.adapter = adapters[target] = _Adapter(
            linear,
            inputs=linear.weight.shape[1],
            outputs=linear.weight.shape[0],
            rank=lora.rank,
            cut="inputs",
        )

    def __call__(self, linear: Any, inputs: Any, output: Any) -> Any:
        """The hook; inputs [tokens, samples, this rank's width]."""
        a, b = self.adapter()
        narrow, group = F.linear(inputs[0], a), _group_of(linear)
        if _splits_sequence(linear):
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=group)
        elif group.size() > 1:
            narrow = reduce_from_tensor_model_parallel_region(narrow, group=group)
        return _added(output, F.linear(narrow * self.scale, b))


def _added(output: Any, more: torch.Tensor) -> Any:
    """What a linear layer returns, which is its result and a bias. `more` is nobody else's."""
    result, bias = output
    return more.add_(result.view(more.shape)).view(result.shape), bias


def _normed(linear: Any, inputs: torch.Tensor) -> torch.Tensor:
    """What the layer multiplies: Transformer Engine's may have the norm before it inside."""
    if type(linear).__name__ != _NORM_AND_COLUMN:
        return inputs
    weight = linear.layer_norm_weight
    if linear.zero_centered_gamma:
        weight = weight + 1
    if linear.normalization == "RMSNorm":
        return F.rms_norm(inputs, weight.shape, weight, linear.eps)
    return F.layer_norm(inputs, weight.shape, weight, linear.layer_norm_bias, linear.eps)


# Initial values: A as `peft` draws it, uniform within 1 / sqrt(inputs); B is zero, so that training
# starts from the base.


def initial_values(chunk: Any, first_layer: int, seed: int) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each adapter's parameter of a wrapped chunk with the whole of its value, in fp32.

    Drawn on the CPU, each from a seed of its own: the same under any plan and on any GPU.
    `first_layer`: the chunk's.
    """
    for number, layer in enumerate(unwrap_model(chunk).decoder.layers, start=first_layer):
        for name, parameter in layer.named_parameters():
            if not is_adapter(name):
                continue
            value = torch.zeros(chunk.parts[parameter].shape)
            if name.endswith(".a"):
                source = hashlib.sha256(f"{seed} {number} {name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(source[:7]))
                bound = 1 / math.sqrt(value.shape[1])
                value.uniform_(-bound, bound, generator=generator)
            yield parameter, value
