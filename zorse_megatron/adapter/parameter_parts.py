"""What a rank of a tensor-parallel group holds of each parameter of its model.

Megatron's layers mark the axis along which a parameter is cut. How they cut it is theirs to know:
`ColumnParallelLinear` and `VocabParallelEmbedding` give each rank consecutive rows, which for the
fused QKV projection are whole KV groups; the fused gate and up projection of a gated MLP has a part
of each (`MLP.__init__`, stride 2); `RowParallelLinear` gives consecutive columns. An expert is cut
into all and nothing (`adapter.model.expert_layers`).
"""

import re
from typing import Any

import torch

from zorse_megatron.runtime.mailbox import ExpertRank, TpRank
from zorse_megatron.schedule.tensor_parallel_parts import (
    TensorPart,
    TpPartition,
    UnitKind,
    cut_part,
)

_GATED = "mlp.linear_fc1."
_UNIT = "zorse_unit"


def held_part(
    name: str, parameter: torch.Tensor, tp_shards: TpPartition, *, is_gated: bool, index: int
) -> TensorPart:
    """What rank `index` of a TP group with these parts holds as `parameter`; `name`: in the
    model."""
    shape, axis = list(parameter.shape), cut_axis(parameter)
    expert = expert_of(name)
    if axis is not None and expert is not None:
        if tp_shards.degree > 1 and expert not in tp_shards.experts_of(index):
            shape[axis] = unit_of(parameter)
    elif axis is not None:
        kind, blocks = kind_of(name), _blocks(name, is_gated)
        if tp_shards.has_any(kind, index):
            shape[axis] = tp_shards.whole_length(kind, index, shape[axis])
        else:
            units = tp_shards.units(kind) or ()
            shape[axis] = blocks * sum(units) * getattr(parameter, _UNIT, 1)
    return part_of_whole(name, shape, axis, tp_shards, is_gated=is_gated, index=index)


def held_parts(
    module: torch.nn.Module, config: Any, place: TpRank | ExpertRank | None
) -> dict[torch.nn.Parameter, TensorPart]:
    """What a rank holds of each parameter of `module`; `place`: None of one that has all of it."""
    own = of_experts = TpPartition(degree=1), 0
    if isinstance(place, TpRank):
        own = of_experts = place.tp_shards, place.index
    elif place is not None:
        of_experts = place.parts, place.index
    is_gated = bool(config.gated_linear_unit)
    found: dict[torch.nn.Parameter, TensorPart] = {}
    for name, parameter in module.named_parameters():
        parts, index = own if expert_of(name) is None else of_experts
        found[parameter] = held_part(name, parameter, parts, is_gated=is_gated, index=index)
    return found


def mark_unit(module: torch.nn.Module, length: int) -> None:
    """Note of cut parameters without elements how long a KV group's part of the axis would be, or
    an expert's.

    A unit of all others is one row or column.
    """
    for parameter in module.parameters():
        if cut_axis(parameter) is not None:
            setattr(parameter, _UNIT, length)


def part_of_whole(
    name: str, shape: Any, axis: int | None, tp_shards: TpPartition, *, is_gated: bool, index: int
) -> TensorPart:
    """The same, from the shape of the whole parameter."""
    if axis is None:
        return TensorPart(shape=tuple(shape), axis=None)
    expert = expert_of(name)
    if expert is not None and tp_shards.degree > 1:
        is_held = expert in tp_shards.experts_of(index)
        pieces = ((0, shape[axis]),) if is_held else ()
        return TensorPart(shape=tuple(shape), axis=axis, pieces=pieces)
    blocks = _blocks(name, is_gated)
    return cut_part(shape, axis, tp_shards, kind_of(name), index=index, blocks=blocks)


def _blocks(name: str, is_gated: bool) -> int:
    return 2 if is_gated and _GATED in name else 1


def kind_of(name: str) -> UnitKind:
    """What a cut parameter of this name is cut by."""
    if expert_of(name) is not None:
        return "experts"
    if "self_attention." in name:
        return "kv_groups"
    return "mlp_columns" if "mlp." in name else "vocabulary_rows"


def expert_of(name: str) -> int | None:
    """Which expert a parameter of this name is of."""
    found = re.search(r"\.local_experts\.(\d+)\.", name)
    return None if found is None else int(found[1])


def unit_of(parameter: torch.Tensor) -> int:
    """What `mark_unit` has noted."""
    length: int = getattr(parameter, _UNIT)
    return length


def cut_axis(parameter: torch.Tensor) -> int | None:
    """The axis along which TP groups cut a parameter; None where each rank has the whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    axis: int = parameter.partition_dim  # type: ignore[attr-defined]
    return axis


def taken(whole: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """What a rank holds, of the values of the whole."""
    if part.axis is None:
        return whole
    pieces = part.pieces or ((0, 0),)
    return torch.cat([whole.narrow(part.axis, a, b - a) for a, b in pieces], dim=part.axis)
