"""Equal parts of tensors, as a plan has them that says none."""

from collections.abc import Sequence

from zorse_megatron.schedule.tensor_parallel_parts import TensorPart, TpPartition, cut_part


def equal_part(
    shape: Sequence[int], axis: int | None, *, index: int, degree: int, blocks: int = 1
) -> TensorPart:
    """What rank `index` of `degree` ranks holds if each of `blocks` of the axis is cut equally."""
    if axis is None:
        return TensorPart(shape=tuple(shape), axis=None)
    tp_shards = TpPartition(degree=degree)
    return cut_part(shape, axis, tp_shards, "mlp_columns", index=index, blocks=blocks)
