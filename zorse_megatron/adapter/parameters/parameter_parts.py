"""What a rank of a tensor-parallel set holds of each parameter of its model.

Megatron's layers mark the axis along which a parameter is cut. How they cut it is theirs to know:
`ColumnParallelLinear` and `VocabParallelEmbedding` give each rank consecutive rows, which for the
fused QKV projection are whole KV groups; the fused gate and up projection of a gated MLP has a part
of each (`MLP.__init__`, stride 2); `RowParallelLinear` gives consecutive columns.
"""

from typing import Any

import torch

from zorse_megatron.schedules.tensor_parts import TensorPart, equal_part

_GATED = "mlp.linear_fc1."


def held_part(
    name: str, parameter: torch.Tensor, *, is_gated: bool, index: int, degree: int
) -> TensorPart:
    """What rank `index` of a set of `degree` ranks holds as `parameter`; `name`: in the model."""
    shape, axis = list(parameter.shape), cut_axis(parameter)
    if axis is not None:
        shape[axis] *= degree
    return part_of_whole(name, shape, axis, is_gated=is_gated, index=index, degree=degree)


def part_of_whole(
    name: str, shape: Any, axis: int | None, *, is_gated: bool, index: int, degree: int
) -> TensorPart:
    """The same, from the shape of the whole parameter."""
    blocks = 2 if is_gated and _GATED in name else 1
    return equal_part(shape, axis, index=index, degree=degree, blocks=blocks)


def cut_axis(parameter: torch.Tensor) -> int | None:
    """The axis along which sets cut a parameter; None where each rank has the whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    axis: int = parameter.partition_dim  # type: ignore[attr-defined]
    return axis


def taken(whole: torch.Tensor, part: TensorPart) -> torch.Tensor:
    """What a rank holds, of the values of the whole."""
    if part.axis is None:
        return whole
    return torch.cat([whole.narrow(part.axis, a, b - a) for a, b in part.pieces], dim=part.axis)
