"""A candidate before and after it is costed."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, MicroBatchLevel, Stage
from zorse_megatron.planner.closed_form.stage_costs import StageCost
from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan but for its layers: groups in model order, micro-batch levels, schedule."""

    device_groups: tuple[DeviceGroup, ...]
    levels: tuple[MicroBatchLevel, ...]
    """Micro-batch sizes of each group."""
    schedule: str = "1f1b"
    num_chunks: int = 1
    """Chunks of each group."""
    reserves: tuple[int, ...] = ()
    """Bytes to be left free on the GPUs of each group; empty: none."""
    slack: float = 1.0
    """1f1b: how much of the time that samples wait and travel is made up for by more in flight."""

    def with_level(self, group: int, level: MicroBatchLevel) -> "Candidate":
        """Another micro-batch level for one group."""
        levels = (*self.levels[:group], level, *self.levels[group + 1 :])
        return replace(self, levels=levels)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A candidate with layers, and its cost."""

    candidate: Candidate
    layers: tuple[int, ...]
    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    extras: tuple[int, ...]
    """Samples in flight of each group beyond those of 1f1b."""
    iteration_s: float
    busy_s: float
    fill_s: float
    tail_s: float


def layers_of_chunks(num_layers: int, num_chunks: int, *, is_last: bool) -> tuple[int, ...]:
    """Layers of each of a group's chunks: as even as whole layers allow, larger ones first.

    All groups have their larger chunks in the same turns, because a turn takes as long as the
    slowest group's chunk. Groups with fewer layers than chunks are left out of the last turns, but
    the model's last group out of the first ones: it has the head.

    >>> layers_of_chunks(5, 2, is_last=False), layers_of_chunks(2, 3, is_last=False)
    ((3, 2), (1, 1, 0))
    >>> layers_of_chunks(2, 3, is_last=True)
    (0, 1, 1)
    """
    least, larger = divmod(num_layers, num_chunks)
    parts = tuple(least + (turn < larger) for turn in range(num_chunks))
    return parts[::-1] if is_last and not least else parts


# How evenly whole layers can be divided among groups: a quick score before any costing.


def balanced_layers(
    num_layers: int, speeds: Sequence[float], most: Sequence[int] | None = None
) -> tuple[tuple[int, ...], float]:
    """Deal layers to groups, one each at least, so that the slowest is done soonest.

    `most`: layers that each group can hold. Returns layers of each group and the slowest group's
    layers / speed; infinite where the groups cannot hold all layers. Greedy is optimal here: every
    further layer goes where it is done soonest. O(layers * log groups).

    >>> balanced_layers(5, [1.0, 2.0]), balanced_layers(5, [1.0, 2.0], most=[9, 2])
    (((2, 3), 2.0), ((3, 2), 3.0))
    """
    room = list(most or [num_layers] * len(speeds))
    layers = [1] * len(speeds)
    if min(room) < 1 or sum(room) < num_layers or len(speeds) > num_layers:
        return tuple(layers), math.inf
    heap = [(2 / speed, index) for index, speed in enumerate(speeds) if room[index] > 1]
    heapq.heapify(heap)
    for _ in range(num_layers - len(speeds)):
        _, index = heap[0]
        layers[index] += 1
        if layers[index] < room[index]:
            heapq.heapreplace(heap, ((layers[index] + 1) / speeds[index], index))
        else:
            heapq.heappop(heap)
    slowest = max(count / speed for count, speed in zip(layers, speeds, strict=True))
    return tuple(layers), slowest


# Classes of GPUs of one kind and capacity, and the micro-batch sizes that suit them.


MemoryClass = tuple[str, int]
"""GPUs of one kind with as much memory to fill: (kind, bytes)."""


def memory_classes_of(inputs: Inputs) -> list[MemoryClass]:
    """All classes of GPUs of the cluster."""
    return sorted(set(zip(inputs.kinds, inputs.tensor_capacities_bytes, strict=True)))


def best_sizes(inputs: Inputs, level: int) -> dict[MemoryClass, int]:
    """For each class the micro-batch size with the best rate up to a level."""

    def cost(kind: str, size: int) -> tuple[float, int]:
        return inputs.compute.layer(kind, size).both_s / size, size

    return {
        each: min(cost(each[0], size) for size in inputs.space.sizes_to(level))[1]
        for each in memory_classes_of(inputs)
    }
