"""Memory of a stage in closed form, on its GPUs and in their hosts.

As in `simulate.memory_ledger`: unsharded parameters and gradients (1f1b) or shards and the chunks
in use (breadth_first), what is kept of every micro-batch in flight, logits, buffers; optimizer
state (and shards) go wherever there is room in the group. Of state in the host two pieces are on
the GPU during the step, when activations are not: what has to fit then is looked at apart.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.costs.process_memory import pinned_bytes, pinned_state_bytes
from zorse_megatron.costs.stage_formulas import (
    frozen_bytes,
    in_flight_micro_batches,
    replica_bytes,
    saved_bytes,
    section_parameters,
    stage_parameters,
    widened_bytes,
    working_bytes,
)
from zorse_megatron.planner.closed_form.device_groups import (
    ClassSettings,
    GpuClass,
    MemorySettings,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedule.shards import largest_piece, passing_at_most
from zorse_megatron.schedule.transfer_windows import SENDS_BEHIND

# Boundary activations that are on the way in and out at once, beside those in flight: what was sent
# lately, the output that is being made, and what is received early.
BUFFERS = SENDS_BEHIND + 4


def whole_micro_batches(count: float) -> int:
    """Some replicas run one more than others."""
    return math.ceil(count - 1e-9)


class StageMemory:
    """Bytes of stages: of each GPU, of the device group, of what is in flight."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.costs = costs = inputs.memory
        self.boundary = costs.boundary_bytes(1)
        self._kept: dict[tuple[str, RecomputeMode], int] = {}
        self._parameters: dict[tuple[int, bool, bool], int] = {}
        self._stage: Stage | None = None
        self._gpus: dict[tuple[int, float, str], GpuMemory] = {}
        """Of that stage."""
        self.head = costs.head_bytes(1)
        self.layer_parameters = costs.layer_parameters()

    def saved(self, kind: str, mode: RecomputeMode = "none") -> int:
        """What a layer keeps of a sample on a kind of GPU."""
        found = self._kept.get((kind, mode))
        if found is None:
            found = self._kept[kind, mode] = self.inputs.members.activation_bytes_on(kind, 1, mode)
        return found

    def boundary_on(self, kind: str) -> int:
        """One activation between layers of a sample; each rank of a TP group has all of it."""
        return self.inputs.members.boundary_bytes_on(kind)

    def recompute_savings(self, kind: str, mode: RecomputeMode) -> int:
        """What a recomputed layer does not keep."""
        return self.saved(kind) - self.saved(kind, mode)

    def parameters(self, num_layers: int, position: StagePosition) -> int:
        """Parameters of a stage."""
        key = num_layers, position.is_first, position.is_last
        found = self._parameters.get(key)
        if found is None:
            found = self._parameters[key] = self._find_parameters(num_layers, position)
        return found

    def _find_parameters(self, num_layers: int, position: StagePosition) -> int:
        ends = position.is_first, position.is_last
        sections = section_parameters(self.costs, *ends, tied_on_same_rank=self._is_tied(position))
        found: int = stage_parameters(num_layers, *sections)
        return found

    def _is_tied(self, position: StagePosition) -> bool:
        return self.inputs.tied_embeddings and position.is_first and position.is_last

    def frozen_bytes(self, stage: Stage) -> int:
        """What each GPU has of parameters that are not trained."""
        position, ends = stage.position, (stage.position.is_first, stage.position.is_last)
        found: int = frozen_bytes(
            self.costs, stage.num_layers, *ends, tied_on_same_rank=self._is_tied(position)
        )
        return found

    def shared_bytes(self, stage: Stage, settings: MemorySettings) -> int:
        """What is spread over the device group by shard weights."""
        costs, parameters = self.costs, self.parameters(stage.num_layers, stage.position)
        total = 0 if settings.offload_state else costs.state_bytes(parameters)
        if stage.position.schedule == "breadth_first":
            reduced = self._reduced_at_once(stage) if settings.offload_gradients else parameters
            total += costs.gradient_bytes(reduced)
            # In the host all but the shards that are on their way: those of one chunk.
            chunks = stage.num_chunks if settings.offload_parameters else 1
            total += costs.parameter_bytes(-(-parameters // chunks))
        return total

    def _reduced_at_once(self, stage: Stage) -> int:
        """Parameters whose reduced gradients are on the GPUs, if others wait in the host.

        Of a chunk that leaves, or that is reduced last; and where TIE adds to them.
        """
        position = stage.position
        tied = self.inputs.tied_embeddings * (position.is_first + position.is_last)
        layers = (1 + tied) * -(-stage.num_layers // stage.num_chunks)
        return min(
            self.parameters(stage.num_layers, position),
            layers * self.layer_parameters + self.parameters(0, position),
        )

    def gpu_free_bytes(
        self, stage: Stage, settings: MemorySettings, size: int, count: float, gpu_class: GpuClass
    ) -> float:
        """What a GPU has free for its part of `shared_bytes`; `size`, `count`: its micro-batches.

        During the passes, or during the step if state in the host passes through then.
        """
        return self._on(stage, size, count, gpu_class.kind).free_bytes(
            settings, gpu_class.capacity_bytes
        )

    def local_bytes(
        self, stage: Stage, settings: MemorySettings, size: int, count: float, kind: str
    ) -> float:
        """What a replica has beside its share, if it runs `count` micro-batches of a size."""
        return self._on(stage, size, count, kind).local_bytes(settings)

    def _on(self, stage: Stage, size: int, count: float, kind: str) -> "GpuMemory":
        if stage is not self._stage:  # all settings of a stage are tried in a row
            self._stage = stage
            self._gpus = {}
        found = self._gpus.get((size, count, kind))
        if found is None:
            found = self._gpus[size, count, kind] = GpuMemory(self, stage, size, count, kind)
        return found

    def layers_in_flight(self, stage: Stage, count: float) -> float:
        """Layers times micro-batches between forward and backward, of a replica with `count`."""
        position = stage.position
        if position.schedule == "breadth_first":
            every = math.ceil(count) * stage.num_layers
            # On the model's last chunk every forward is followed by its backward.
            turned = (math.ceil(count) - 1) * (stage.num_layers // stage.num_chunks)
            return every - max(0, turned) if position.is_last else every
        return self.limit(position, count) * stage.num_layers / stage.num_chunks

    def unsharded_bytes(self, stage: Stage) -> int:
        """Unsharded parameters that are trained, and gradients, on each GPU."""
        costs = self.costs
        parameters = self.parameters(stage.num_layers, stage.position)
        if stage.position.schedule != "breadth_first":
            return costs.parameter_bytes(parameters) + costs.gradient_bytes(parameters)
        # Two chunks at most: one in use, one being gathered or reduced.
        layers = min(stage.num_chunks, 2) * -(-stage.num_layers // stage.num_chunks)
        ends = self.parameters(0, stage.position)
        if stage.num_chunks > 2 and stage.position.is_first and stage.position.is_last:
            # Never both of them: embedding and head are of chunks far apart.
            apart = (
                replace(stage.position, is_last=False),
                replace(stage.position, is_first=False),
            )
            ends = max(self.parameters(0, position) for position in apart)
        both = layers * self.layer_parameters + ends
        return costs.parameter_bytes(both) + costs.gradient_bytes(both)

    def limit(self, position: StagePosition, count: float) -> float:
        """Micro-batches in flight, once for each chunk: a replica's part of the in-flight limit."""
        if position.is_last and position.schedule == "1f1b" and count:
            return 1  # backwards go first, and the last group always has one to run
        if not count:
            return 0
        batch = self.inputs.global_batch_size
        part: int = in_flight_micro_batches(position.in_flight_limit, count, batch)
        return min(math.ceil(count) * position.num_chunks, part)

    def free_bytes(self, stage: Stage, counts: Sequence[float], settings: ClassSettings) -> float:
        """Bytes that are left in the device group, below 0 where something does not fit."""
        free, least = 0.0, math.inf
        for gpu_class, size, count, own in zip(
            stage.device_group.gpu_classes, stage.sizes, counts, settings, strict=True
        ):
            one = self.gpu_free_bytes(stage, own, size, whole_micro_batches(count), gpu_class)
            least = min(least, one)
            free += len(gpu_class.ranks) * one
        # All classes keep parameters and optimizer state in the same place.
        return least if least < 0 else free - self.shared_bytes(stage, settings[0])


class GpuMemory:
    """A GPU of a stage with its micro-batches: what it holds, whatever settings are tried."""

    def __init__(
        self, memory: StageMemory, stage: Stage, size: int, count: float, kind: str
    ) -> None:
        self.memory, self.stage, self.size, self.kind = memory, stage, size, kind
        position, chunks = stage.position, stage.num_chunks
        self.runs_any = bool(count)
        self.layers = memory.layers_in_flight(stage, count)
        self.unsharded = memory.unsharded_bytes(stage)
        self.frozen = memory.frozen_bytes(stage)
        self.whole = memory.saved(kind)
        alone = position.is_first and position.is_last and chunks == 1
        self.buffers = 0 if alone else BUFFERS * memory.boundary_on(kind)
        self.parameters = memory.parameters(stage.num_layers, position)
        self._local: dict[tuple[RecomputeMode, int, bool], float] = {}

    def free_bytes(self, settings: MemorySettings, capacity_bytes: int) -> float:
        """See `StageMemory.gpu_free_bytes`."""
        in_passes = capacity_bytes - self.local_bytes(settings)
        widened = self._widened_bytes(settings)
        if not (settings.offload_state or widened):
            return in_passes
        stage, costs = self.stage, self.memory.costs
        resident = 0 if stage.position.schedule == "breadth_first" else self.unsharded
        resident += widened + stage.reserve_bytes + self.frozen
        if settings.offload_state:
            resident += costs.state_bytes(passing_at_most(self.parameters))
        # Of the two chunks whose pieces pass through.
        passing = -(-2 * self.parameters // (stage.num_chunks * len(stage.device_group.ranks)))
        if settings.offload_parameters:
            resident += costs.parameter_bytes(passing)
        if settings.offload_gradients:
            resident += costs.gradient_bytes(passing)
        return min(in_passes, capacity_bytes - resident)

    def _widened_bytes(self, settings: MemorySettings) -> int:
        """fp32 copies of gradients in a step, if shards are even; see `simulate.residency`."""
        owned = -(-self.parameters // len(self.stage.device_group.ranks))
        if settings.offload_state:
            owned = largest_piece(owned)
        elif settings.offload_parameters or settings.offload_gradients:
            owned = -(-owned // self.stage.num_chunks)
        return widened_bytes(self.memory.costs, owned)

    def local_bytes(self, settings: MemorySettings) -> float:
        """See `StageMemory.local_bytes`."""
        key = settings.mode, settings.recomputed, settings.offload_activations
        found = self._local.get(key)
        if found is None:
            found = self._local[key] = self._local_bytes(*key)
        return found

    def _local_bytes(self, mode: RecomputeMode, recomputed: int, away: bool) -> float:
        """`away`: whether activations wait in the host."""
        memory, stage = self.memory, self.stage
        position, chunks = stage.position, stage.num_chunks
        each, layers = (self.whole, memory.saved(self.kind, mode)), self.layers
        if away:
            # One on its way out, one on its way in, one in use, each of one chunk.
            layers = min(layers, 3 * stage.num_layers / chunks)
        saved = saved_bytes(stage.num_layers, recomputed, *each)
        in_chunk, head = stage.num_layers // chunks, 0.0
        again = working_bytes(in_chunk, min(in_chunk, -(-recomputed // chunks)), *each)
        if position.is_last:
            again = max(0, again - memory.head)  # after the head's backward frees its part
            in_flight = layers * chunks / stage.num_layers
            head = memory.head * (
                1.0 if position.schedule == "breadth_first" else min(in_flight, 2.0)
            )
        working = again + self.buffers + head if self.runs_any else 0.0
        found: float = replica_bytes(
            self.unsharded + self.frozen,
            self.size,
            layers * saved / stage.num_layers,
            working,
            stage.reserve_bytes,
        )
        return found


# What of a stage may wait in host memory, cheapest first, and whether the hosts hold it.
#
# Parameters are fetched while the GPU computes, two chunks ahead, so that only the step waits for
# them; optimizer state, six times as much, passes through the GPU in the step alone. Gradients, of
# which a shard leaves in each visit, pass through it twice; they go where all else is there
# already. Only breadth_first releases parameters and reduces chunk by chunk. Two chunks' are
# unsharded on the GPU and a third one's shard is on its way there, so with three chunks or fewer
# nothing is gained.


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
    """Bytes of stages in host memory, as `simulate.result` counts them: in pinned blocks."""

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
        saved: float = saved_bytes(stage.num_layers, settings.recomputed, *each)
        return saved / stage.num_layers * self.memory.layers_in_flight(stage, count)

    def _blocks(self, size: int, mode: RecomputeMode, kind: str) -> int:
        """What one layer keeps of a micro-batch."""
        key = size, mode, kind
        if key not in self._kept:
            tensors = self.memory.inputs.members.saved_tensor_bytes_on(kind, size, mode)
            self._kept[key] = sum(map(pinned_bytes, tensors))
        return self._kept[key]


# Water-filling of training state over free memory: as even as capacities allow.


def water_fill(total: float, capacities: Sequence[float]) -> tuple[float, ...] | None:
    """Share `total` out so that none exceeds its capacity and the largest is as small as can be.

    Every share is the smaller of its capacity and one common level. None where the capacities do
    not hold the total. O(n log n).

    >>> water_fill(9, [10, 10, 10]), water_fill(9, [1, 5, 10]), water_fill(9, [1, 2, 3])
    ((3.0, 3.0, 3.0), (1, 4.0, 4.0), None)
    """
    if total > sum(max(0.0, capacity) for capacity in capacities):
        return None
    left, level = float(total), 0.0
    order = sorted(range(len(capacities)), key=lambda index: capacities[index])
    for position, index in enumerate(order):
        level = left / (len(order) - position)
        capacity = max(0.0, capacities[index])
        if capacity >= level:
            break
        left -= capacity
    return tuple(max(0.0, capacity) if capacity < level else level for capacity in capacities)
