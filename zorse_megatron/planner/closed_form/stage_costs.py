"""Cost of a stage in closed form: time, recomputation, offload.

If memory (see `stage_memory`) does not suffice, layers are recomputed, as few as possible, or
parameters, optimizer state and the inputs of layers wait in the host (see `host_settings`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from zorse_megatron.costs.interface import PassTimes
from zorse_megatron.costs.stage_formulas import micro_batches_per_replica, pass_s, samples_per_s
from zorse_megatron.planner.closed_form.device_groups import (
    ClassSettings,
    DeviceGroup,
    GpuClass,
    MemorySettings,
    MicroBatchLevel,
    Stage,
)
from zorse_megatron.planner.closed_form.stage_memory import StageHostMemory, StageMemory
from zorse_megatron.planner.closed_form.stage_settings import SettingsByClass, SettingsToTry
from zorse_megatron.planner.inputs.search_inputs import Inputs

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
# A replica's micro-batch may take so much longer than one sample on the group's slowest GPU.
_MOST_SLOWER = 1.5


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """What a stage takes, with the settings with which it fits."""

    num_layers: int
    settings: ClassSettings
    passes: tuple[PassTimes, ...]
    """One micro-batch of each GPU class through the stage."""
    busy_s: float
    """Time of its slowest replica, with whole micro-batches."""
    forward_s: float
    """Longest forward of a micro-batch."""
    backward_s: float
    mean_micro_batch_s: float
    """Forward and backward of a micro-batch, mean over samples."""
    step_s: float
    """The optimizer step with even shards."""
    fetches_s: float
    """Parameters that come from the host, once for the forward and once for the backward, or
    gradients that go there, if that takes longer."""
    free_bytes: float
    """What is left in the device group when all is placed; at least 0."""


@dataclass(kw_only=True)
class _Known:
    """What stages cost, by what that depends on but for what all of a search have in common."""

    costs: dict[tuple[object, ...], StageCost | None] = field(default_factory=dict)
    passes: dict[tuple[object, ...], tuple[PassTimes, ...]] = field(default_factory=dict)
    busy: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)


class StageCostModel:
    """Costs stages, each once."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.memory = StageMemory(inputs)
        self.host = StageHostMemory(self.memory)
        self._sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
        known = inputs.shared("stages", _Known)
        self._costs, self._passes, self._busy_of = known.costs, known.passes, known.busy
        self.to_try = SettingsToTry(self)
        self._by_class = SettingsByClass(self)

    # Micro-batch sizes.

    def levels(self) -> tuple[int, ...]:
        """Caps on the micro-batch size that are tried."""
        sizes = self.inputs.space.sizes(_SIZES)
        most = self.inputs.space.max_micro_batch_size or sizes[-1]
        most = min(most, self.inputs.global_batch_size)
        return tuple(size for size in sizes if size <= most)

    def sizes(self, device_group: DeviceGroup, level: MicroBatchLevel) -> tuple[int, ...]:
        """Micro-batch size of each GPU class: as given, or that with the best rate up to the level.

        In the latter case slow GPUs take smaller ones, so that a sample takes about as long on any
        replica.
        """
        if isinstance(level, tuple):
            return level
        key = (device_group.look, level)
        if key not in self._sizes:
            least = self.inputs.space.sample_block
            slowest = least * max(
                self._sample_s(gpu_class, least) for gpu_class in device_group.gpu_classes
            )
            fastest = min(
                self._sample_s(gpu_class, level) * level for gpu_class in device_group.gpu_classes
            )
            limit = _MOST_SLOWER * max(slowest, fastest)
            self._sizes[key] = tuple(
                self._best_size(gpu_class, level, limit) for gpu_class in device_group.gpu_classes
            )
        return self._sizes[key]

    def _best_size(self, gpu_class: GpuClass, level: int, limit_s: float) -> int:
        least, *sizes = self.inputs.space.sizes_to(level)
        allowed = [least, *(m for m in sizes if self._sample_s(gpu_class, m) * m <= limit_s)]
        return min(allowed, key=lambda m: (self._sample_s(gpu_class, m), m))

    def _sample_s(self, gpu_class: GpuClass, size: int) -> float:
        return self.inputs.compute.layer(gpu_class.kind, size).both_s / size

    # Costs.

    def cost(self, stage: Stage) -> StageCost | None:
        """The cheapest way to fit; None where there is none."""
        key = stage.key
        if key not in self._costs:
            self._costs[key] = self._find(stage)
        return self._costs[key]

    def _find(self, stage: Stage) -> StageCost | None:
        """Of all ways to fit the one that takes least time: recomputation costs in every pass,
        copies of optimizer state once an iteration."""
        found: list[tuple[float, int, StageCost]] = []
        for order, (settings, free) in enumerate(self._fitting(stage)):
            cost = self.with_settings(stage, settings, free)
            found.append((cost.busy_s + cost.step_s, order, cost))
        return min(found, key=lambda row: row[:2])[2] if found else None

    def _fitting(self, stage: Stage) -> Iterator[tuple[ClassSettings, float]]:
        """Settings with which the stage fits, and what they leave free; the same for all GPU
        classes before those that differ."""
        counts = self.counts(stage)
        keeps: MemorySettings | None = None
        for settings, free in self._of_all(stage, counts, self.to_try.all(stage, counts)):
            yield stage.alike(settings), free
            keeps = settings if not settings.recomputed else None
        away = self.to_try.with_activations(stage, counts, keeps)
        for settings, free in self._of_all(stage, counts, away):
            yield stage.alike(settings), free
        yield from self._by_class.fitting(stage, keeps)

    def _of_all(
        self, stage: Stage, counts: Sequence[float], to_try: Iterator[MemorySettings]
    ) -> Iterator[tuple[MemorySettings, float]]:
        """Of settings for all classes those that fit, up to the first that recomputes nothing:
        what follows offloads more, for nothing."""
        for settings in to_try:
            alike = stage.alike(settings)
            free = self.memory.free_bytes(stage, counts, alike)
            if free >= 0 and self.host.holds(stage, counts, alike):
                yield settings, free
                if not settings.recomputed:
                    return

    def step_s(self, stage: Stage, settings: ClassSettings) -> float:
        """The optimizer step with even shards, what waits in the host included."""
        owned = self._owned(stage)
        step_s, classes = self.inputs.compute.step_s, stage.device_group.gpu_classes
        compute_s = max(step_s(gpu_class.kind, owned) for gpu_class in classes)
        return max(compute_s, self._copies_s(stage, settings))

    def _owned(self, stage: Stage) -> int:
        """Parameters of a GPU's shard, if shards are even."""
        parameters = self.memory.parameters(stage.num_layers, stage.position)
        return parameters // len(stage.device_group.ranks)

    def _copies_s(self, stage: Stage, settings: ClassSettings) -> float:
        """What a step brings from the host, and takes back meanwhile, on the slowest host link."""
        if not any(own.offloads_anything for own in settings):
            return 0.0
        memory, owned, found = self.inputs.memory, self._owned(stage), 0.0
        for gpu_class, own in zip(stage.device_group.gpu_classes, settings, strict=True):
            copied = memory.state_bytes(owned) if own.offload_state else 0
            copied += memory.parameter_bytes(owned) if own.offload_parameters else 0
            copied += 2 * memory.gradient_bytes(owned) if own.offload_gradients else 0
            found = max(found, copied / gpu_class.host_link_bytes_per_s)
        return found

    def _fetches_s(self, stage: Stage, settings: ClassSettings) -> float:
        """See `StageCost.fetches_s`; of the slowest host link, whose directions share nothing."""
        if not any(own.offloads_anything for own in settings):
            return 0.0
        memory, owned, found = self.inputs.memory, self._owned(stage), 0.0
        for gpu_class, own in zip(stage.device_group.gpu_classes, settings, strict=True):
            comes = 2 * memory.parameter_bytes(owned) if own.offload_parameters else 0
            goes = memory.gradient_bytes(owned) if own.offload_gradients else 0
            found = max(found, max(comes, goes) / gpu_class.host_link_bytes_per_s)
        return found

    def passes(self, stage: Stage, settings: ClassSettings) -> tuple[PassTimes, ...]:
        """One micro-batch of each GPU class through all of the stage's layers, ends included."""
        position = stage.position
        key = (
            stage.device_group.look,
            stage.num_layers,
            stage.sizes,
            position.is_first,
            position.is_last,
            tuple((own.mode, own.recomputed) for own in settings),
        )
        found = self._passes.get(key)
        if found is None:
            found = self._passes[key] = self._find_passes(stage, settings)
        return found

    def _find_passes(self, stage: Stage, settings: ClassSettings) -> tuple[PassTimes, ...]:
        position, layers, result = stage.position, stage.num_layers, []
        for gpu_class, size, own in zip(
            stage.device_group.gpu_classes, stage.sizes, settings, strict=True
        ):
            kind, again_s = gpu_class.kind, 0.0
            layer = self.inputs.compute.layer(kind, size)
            if own.recomputed:
                again_s = own.recomputed * self.inputs.compute.recompute_s(kind, size, own.mode)
            first, last = self._ends(kind, size, position.is_first, position.is_last)
            forward_s = pass_s(layers, layer.forward_s, 0.0, first.forward_s, last.forward_s)
            backward_s = pass_s(
                layers, layer.backward_s, again_s, first.backward_s, last.backward_s
            )
            result.append(PassTimes(forward_s=forward_s, backward_s=backward_s))
        return tuple(result)

    def _ends(
        self, kind: str, size: int, is_first: bool, is_last: bool
    ) -> tuple[PassTimes, PassTimes]:
        """Embedding and head, or what comes from another group instead."""
        compute, arrival_s = self.inputs.compute, self.inputs.members.arrival_s(kind, size)
        first = PassTimes(forward_s=arrival_s, backward_s=0.0)
        last = PassTimes(forward_s=0.0, backward_s=arrival_s)
        return (
            compute.embedding(kind, size) if is_first else first,
            compute.head(kind, size) if is_last else last,
        )

    def counts(self, stage: Stage, settings: ClassSettings = ()) -> tuple[float, ...]:
        """Micro-batches of one replica of each GPU class, if the batch is cut at will.

        What all classes recompute alike slows them alike: only settings that differ count.
        """
        if len(set(settings)) <= 1:
            settings = stage.alike(MemorySettings())
        both_s = [each.both_s for each in self.passes(stage, settings)]
        num_gpus = [len(gpu_class.ranks) for gpu_class in stage.device_group.gpu_classes]
        return tuple(
            micro_batches_per_replica(self.inputs.global_batch_size, num_gpus, stage.sizes, both_s)
        )

    def with_settings(self, stage: Stage, settings: ClassSettings, free: float) -> StageCost:
        """Times of a stage with these settings."""
        passes = self.passes(stage, settings)
        key = stage.device_group.look, stage.sizes, passes
        found = self._busy_of.get(key)
        if found is None:
            found = self._busy_of[key] = self._busy(stage, passes)
        busy_s, mean_s = found
        return StageCost(
            num_layers=stage.num_layers,
            settings=settings,
            passes=passes,
            busy_s=busy_s,
            forward_s=max(each.forward_s for each in passes),
            backward_s=max(each.backward_s for each in passes),
            mean_micro_batch_s=mean_s,
            step_s=self.step_s(stage, settings),
            fetches_s=self._fetches_s(stage, settings),
            free_bytes=free,
        )

    def _busy(self, stage: Stage, passes: Sequence[PassTimes]) -> tuple[float, float]:
        """Time of the slowest replica with whole micro-batches, and the mean time of one."""
        batch = self.inputs.global_batch_size
        both_s = [each.both_s for each in passes]
        together = [
            len(gpu_class.ranks) * size
            for gpu_class, size in zip(stage.device_group.gpu_classes, stage.sizes, strict=True)
        ]
        rate: float = samples_per_s(together, both_s)
        mean_s = sum(together) / rate  # weighted by samples per second
        rows = list(zip(together, both_s, strict=True))
        limit_s = batch / rate * (1 - 1e-12)
        while True:
            done = sum(samples * math.floor(limit_s / s * (1 + 1e-9)) for samples, s in rows)
            if done >= batch:
                return limit_s, mean_s
            limit_s = min((math.floor(limit_s / s * (1 + 1e-9)) + 1) * s for _, s in rows)
