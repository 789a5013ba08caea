"""Classes of GPUs of one kind and capacity, and the micro-batch sizes that suit them."""

from zorse_megatron.planner.closed_form.stage_costs import StageCostModel
from zorse_megatron.planner.inputs.search_inputs import Inputs

MemoryClass = tuple[str, int]
"""GPUs of one kind with as much memory to fill: (kind, bytes)."""


def memory_classes_of(inputs: Inputs) -> list[MemoryClass]:
    """All classes of GPUs of the cluster."""
    return sorted(set(zip(inputs.kinds, inputs.tensor_capacities_bytes, strict=True)))


def best_sizes(inputs: Inputs, cost_model: StageCostModel, level: int) -> dict[MemoryClass, int]:
    """For each class the micro-batch size with the best rate up to a level."""

    def cost(kind: str, size: int) -> tuple[float, int]:
        return sum(cost_model.layer_s(kind, size)) / size, size

    return {
        each: min(cost(each[0], size) for size in range(1, level + 1))[1]
        for each in memory_classes_of(inputs)
    }
