"""What of a stage may wait in host memory, cheapest first, and whether the hosts hold it.

Parameters are fetched while the GPU computes, two chunks ahead, so that only the step waits for
them; optimizer state, six times as much, passes through the GPU in the step alone. Gradients, of
which a shard leaves in each visit, pass through it twice; they go where all else is there already.
Only breadth_first releases parameters and reduces chunk by chunk. Two chunks' are unsharded on the
GPU and a third one's shard is on its way there, so with three chunks or fewer nothing is gained.
"""

from collections.abc import Iterator, Sequence

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.costs.pinned import pinned_bytes, pinned_state_bytes
from zorse_megatron.costs.stage_formulas import kept_bytes
from zorse_megatron.planner.closed_form.stage import ClassSettings, MemorySettings, Stage
from zorse_megatron.planner.closed_form.stage_memory import StageMemory, whole_micro_batches
from zorse_megatron.planner.closed_form.water_filling import water_fill

_CHUNKS_ON_GPU = 3


def host_settings(stage: Stage) -> Iterator[MemorySettings]:
    """Settings that keep parameters, optimizer state and gradients on the GPU or in the host."""
    releases = stage.position.schedule == "breadth_first" and stage.num_chunks > _CHUNKS_ON_GPU
    for offload_state in (False, True):
        for offload_parameters in (False, True) if releases else (False,):
            yield MemorySettings(offload_state=offload_state, offload_parameters=offload_parameters)
    for offload_parameters in (False, True) if releases else ():
        yield MemorySettings(
            offload_state=True, offload_gradients=True, offload_parameters=offload_parameters
        )


class StageHostMemory:
    """Bytes of stages in host memory, as `simulate.host_memory` counts them: in pinned blocks."""

    def __init__(self, memory: StageMemory) -> None:
        self.memory = memory
        self._kept: dict[tuple[int, RecomputeMode, str], int] = {}

    def holds(self, stage: Stage, counts: Sequence[float], settings: ClassSettings) -> bool:
        """Whether each GPU's part of its node's memory takes what it offloads.

        Where its size is not known, it does. `counts`: micro-batches of a replica of each GPU
        class.
        """
        classes = stage.device_group.gpu_classes
        known = any(gpu_class.host_bytes is not None for gpu_class in classes)
        if not known or not any(each.offloads_anything for each in settings):
            return True
        needed = self.needed_bytes(stage, counts, settings)
        return all(
            gpu_class.host_bytes is None or num_bytes <= gpu_class.host_bytes
            for gpu_class, num_bytes in zip(classes, needed, strict=True)
        )

    def needed_bytes(
        self, stage: Stage, counts: Sequence[float], settings: ClassSettings
    ) -> list[float]:
        """What a GPU of each class has there; arguments as of `holds`."""
        owned = self._owned(stage, counts, settings)
        return [
            self._trained_bytes(stage, own, owned[at])
            + self._gradient_bytes(stage, own, owned[at])
            + self._activation_bytes(stage, own, at, counts[at])
            for at, own in enumerate(settings)
        ]

    def _owned(self, stage: Stage, counts: Sequence[float], settings: ClassSettings) -> list[float]:
        """Parameters that a GPU of each class owns of a chunk: by free memory, as in the plan."""
        memory, classes = self.memory, stage.device_group.gpu_classes
        free = [
            memory.gpu_free_bytes(stage, own, size, whole_micro_batches(count), gpu_class)
            for gpu_class, size, count, own in zip(
                classes, stage.sizes, counts, settings, strict=True
            )
        ]
        each = [len(gpu_class.ranks) for gpu_class in classes]
        of_gpus = [one for one, number in zip(free, each, strict=True) for _ in range(number)]
        filled = water_fill(memory.shared_bytes(stage, settings[0]), of_gpus)
        part = memory.parameters(stage.num_layers, stage.position) / stage.num_chunks
        if filled is None or not sum(filled):
            return [part / len(of_gpus)] * len(classes)
        firsts = [sum(each[:at]) for at in range(len(each))]
        return [part * filled[first] / sum(filled) for first in firsts]

    def _trained_bytes(self, stage: Stage, settings: MemorySettings, owned: float) -> int:
        """Optimizer state and parameters of all chunks, a block for each."""
        costs, number = self.memory.costs, -int(-owned // 1)
        blocks = 0
        if settings.offload_state:
            blocks += pinned_state_bytes(costs.state_bytes(number), number)
        if settings.offload_parameters:
            blocks += pinned_bytes(costs.parameter_bytes(number))
        return stage.num_chunks * blocks

    def _gradient_bytes(self, stage: Stage, settings: MemorySettings, owned: float) -> int:
        """A block for each chunk but one, that which is reduced last."""
        if not settings.offload_gradients:
            return 0
        block = pinned_bytes(self.memory.costs.gradient_bytes(-int(-owned // 1)))
        return (stage.num_chunks - 1) * block

    def _activation_bytes(
        self, stage: Stage, settings: MemorySettings, at: int, count: float
    ) -> float:
        """A block for each tensor in flight: of recomputed layers their inputs."""
        if not settings.offload_activations:
            return 0.0
        kind, size = stage.device_group.gpu_classes[at].kind, stage.sizes[at]
        each = self._blocks(size, "none", kind), self._blocks(size, settings.mode, kind)
        kept: float = kept_bytes(stage.num_layers, settings.recomputed, *each)
        return kept / stage.num_layers * self.memory.layers_in_flight(stage, count)

    def _blocks(self, size: int, mode: RecomputeMode, kind: str) -> int:
        """What one layer keeps of a micro-batch."""
        key = size, mode, kind
        if key not in self._kept:
            tensors = self.memory.costs.kept_tensor_bytes(*key)
            self._kept[key] = sum(map(pinned_bytes, tensors))
        return self._kept[key]
