"""Memory settings that are tried for a stage: the same for all its GPUs, or by class."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from zorse_megatron.costs.stage_formulas import saved_bytes
from zorse_megatron.planner.closed_form.device_groups import (
    ClassSettings,
    GpuClass,
    MemorySettings,
    Stage,
)
from zorse_megatron.planner.closed_form.stage_memory import host_settings, whole_micro_batches

if TYPE_CHECKING:
    from zorse_megatron.planner.closed_form.stage_costs import StageCostModel


class SettingsToTry:
    """Recomputation, as little as fits, with and without what waits in the host."""

    def __init__(self, cost_model: "StageCostModel") -> None:
        self.cost_model = cost_model
        self.memory = cost_model.memory
        self.space = cost_model.inputs.space

    def all(self, stage: Stage, counts: Sequence[float]) -> Iterator[MemorySettings]:
        """Recomputation with what it can spare, with and without host memory."""
        hosts = self.hosts(stage)
        for host in hosts:
            yield from self._recomputing(stage, counts, host)
        if self.space.offload and "full" in self.space.recompute:
            full = MemorySettings(
                mode="full", recomputed=stage.num_layers, offload_activations=True
            )
            if self.copies_in_time(stage, full):
                for host in hosts:
                    yield replace(
                        full,
                        offload_parameters=host.offload_parameters,
                        offload_state=host.offload_state,
                        offload_gradients=host.offload_gradients,
                    )

    def with_activations(
        self, stage: Stage, counts: Sequence[float], keeps: MemorySettings | None = None
    ) -> Iterator[MemorySettings]:
        """What layers keep waits in the host; as much is recomputed as the host link needs, too.

        `keeps`: settings that fit without recomputation, if there are any, which are as fast as
        what has as much or more in the host beside activations.
        """
        most = MemorySettings(mode="none", offload_activations=True)
        if "full" in self.space.recompute:  # then least is copied
            most = replace(most, mode="full", recomputed=stage.num_layers)
        allowed = self.space.offload and self.space.offload_activations
        if not allowed or not self.copies_in_time(stage, most):
            return
        for host in self.hosts(stage):
            if host == keeps:
                return
            away = replace(host, offload_activations=True)
            least = replace(away, mode=most.mode, recomputed=most.recomputed)
            if not self._fits(stage, counts, least):
                continue
            for settings in self._recomputing(stage, counts, away):
                if self.copies_in_time(stage, settings):
                    yield settings

    def hosts(self, stage: Stage) -> list[MemorySettings]:
        """What may wait in the host beside activations, cheapest first; nothing comes first."""
        if not self.space.offload:
            return [MemorySettings()]
        alike = self.cost_model.inputs.members.are_cut_alike(stage.device_group.ranks)
        # The runtime keeps shards of replicas that differ in TP shards on the GPUs.
        return [
            each
            for each in host_settings(stage)
            if alike or not (each.offload_parameters or each.offload_gradients)
        ]

    def _recomputing(
        self, stage: Stage, counts: Sequence[float], host: MemorySettings
    ) -> Iterator[MemorySettings]:
        """Nothing, core attention, as few layers as fit, those that cost least time first."""
        space = self.space
        if "none" in space.recompute:
            yield host
        kinds = {gpu_class.kind for gpu_class in stage.device_group.gpu_classes}
        spares = any(self.memory.recompute_savings(kind, "selective") > 0 for kind in kinds)
        if "selective" in space.recompute and spares:
            yield replace(host, mode="selective", recomputed=stage.num_layers)
        if "full" in space.recompute:
            yield from self._full(stage, counts, host)

    def copies_in_time(self, stage: Stage, settings: MemorySettings) -> bool:
        """Whether the host link takes what a forward keeps in no more than the forward's time."""
        memory = self.memory

        def saved(kind: str) -> int:
            each = memory.saved(kind), memory.saved(kind, settings.mode)
            found: int = saved_bytes(stage.num_layers, settings.recomputed, *each)
            return found

        return all(
            size * saved(gpu_class.kind) / gpu_class.host_link_bytes_per_s <= passes.forward_s
            for gpu_class, size, passes in zip(
                stage.device_group.gpu_classes,
                stage.sizes,
                self.cost_model.passes(stage, stage.alike(settings)),
                strict=True,
            )
        )

    def _full(
        self, stage: Stage, counts: Sequence[float], host: MemorySettings
    ) -> Iterator[MemorySettings]:
        """The least number of recomputed layers that fits, by bisection: memory only falls.
        Then shards get more equal, too, and the fullest host has less."""
        layers, step = stage.num_layers, stage.num_chunks  # as many layers of every chunk
        low, high = 1, max(1, -(-layers // step))

        def settings(number: int) -> MemorySettings:
            return replace(host, mode="full", recomputed=min(layers, number * step))

        if "none" not in self.space.recompute:
            low = high
        if not self._fits(stage, counts, settings(high)):
            return
        fits = partial(self._fits, stage, counts)
        yield settings(low + bisect_left(range(low, high), True, key=lambda n: fits(settings(n))))

    def _fits(self, stage: Stage, counts: Sequence[float], settings: MemorySettings) -> bool:
        alike = stage.alike(settings)
        if settings.offload_activations and not self.copies_in_time(stage, settings):
            return False
        enough = self.memory.free_bytes(stage, counts, alike) >= 0
        return enough and self.cost_model.host.holds(stage, counts, alike)


# Settings of a stage that differ between its GPU classes: a T4 recomputes what an A100 keeps.
#
# What one class must recompute to fit itself, others need not. What all of them lack together for
# optimizer state (and shards), which goes wherever there is room, one class after the other spares,
# in both orders. Recomputed layers free equal amounts each, so their number follows from two of
# them. The batch is then split by the new speeds; a class that recomputes less runs more
# micro-batches and has more in flight, so this is repeated until it fits.


_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class _Option:
    """Memory of a GPU class in one mode, by the number of recomputed layers of each chunk."""

    settings: MemorySettings
    num_gpus: int
    num_layers: int
    step: int
    """Layers that are recomputed together: one of every chunk."""
    least: int
    """The fewest with which one of the GPUs fits."""
    most: int
    saved_bytes: float
    """Free on one GPU where nothing is recomputed."""
    first_bytes: float
    """The same with one layer of each chunk recomputed, which needs memory while that is done."""
    more_bytes: float
    """By how much each further one frees more."""

    def free_bytes(self, number: int) -> float:
        """Of all GPUs of the class."""
        if not number:
            return self.num_gpus * self.saved_bytes
        return self.num_gpus * (self.first_bytes + (number - 1) * self.more_bytes)

    def enough(self, needed_bytes: float) -> int:
        """The fewest that leave so much free; `most` where none do."""
        if self.free_bytes(self.least) >= needed_bytes or self.most == self.least:
            return self.least
        if not self.more_bytes:
            return self.most
        further = (needed_bytes / self.num_gpus - self.first_bytes) / self.more_bytes
        return min(self.most, max(self.least, 1, 1 + math.ceil(further - 1e-9)))

    def with_number(self, number: int) -> MemorySettings:
        """Settings with so many."""
        if self.settings.mode == "selective" or not number:
            return self.settings
        recomputed = min(self.num_layers, number * self.step)
        return replace(self.settings, mode="full", recomputed=recomputed)


class SettingsByClass:
    """Finds settings for stages with several GPU classes."""

    def __init__(self, cost_model: "StageCostModel") -> None:
        self.cost_model = cost_model
        self.space = cost_model.inputs.space

    def fitting(
        self, stage: Stage, keeps: MemorySettings | None
    ) -> Iterator[tuple[ClassSettings, float]]:
        """Settings that differ and fit, and what they leave free.

        `keeps`: settings for all classes that fit without recomputation, if there are any.
        """
        if len(stage.device_group.gpu_classes) == 1 or "none" not in self.space.recompute:
            return
        for host in self.cost_model.to_try.hosts(stage):
            if host == keeps:
                return
            yield from self._with_host(stage, host)

    def _with_host(
        self, stage: Stage, host: MemorySettings
    ) -> Iterator[tuple[ClassSettings, float]]:
        counts = self.cost_model.counts(stage)
        for _ in range(_ROUNDS):
            ways = dict.fromkeys(self._ways(stage, host, counts))
            rows = [(way, self.cost_model.counts(stage, way)) for way in ways]
            fitting = [
                (way, free)
                for way, own in rows
                if (free := self.cost_model.memory.free_bytes(stage, own, way)) >= 0
                and self.cost_model.host.holds(stage, own, way)
            ]
            if fitting or not rows:
                yield from fitting
                return
            counts = min(rows, key=lambda row: self._busy_s(stage, row))[1]

    def _busy_s(self, stage: Stage, row: tuple[ClassSettings, Sequence[float]]) -> float:
        """Time of the batch, if it is cut at will: that of any class with its count."""
        way, counts = row
        return counts[0] * self.cost_model.passes(stage, way)[0].both_s

    def _ways(
        self, stage: Stage, host: MemorySettings, counts: Sequence[float]
    ) -> Iterator[ClassSettings]:
        """Settings that differ with which so many micro-batches fit."""
        needed = self.cost_model.memory.shared_bytes(stage, host)
        classes = zip(stage.device_group.gpu_classes, stage.sizes, counts, strict=True)
        options = [list(self._options(stage, host, *row)) for row in classes]
        for chosen in product(*options):
            for order in (range(len(chosen)), reversed(range(len(chosen)))):
                numbers = _numbers(chosen, order, needed)
                if numbers is None:
                    continue
                way = tuple(one.with_number(n) for one, n in zip(chosen, numbers, strict=True))
                if len(set(way)) > 1:
                    yield way

    def _options(
        self, stage: Stage, host: MemorySettings, gpu_class: GpuClass, size: int, count: float
    ) -> Iterator[_Option]:
        """Modes in which a GPU of the class fits."""
        memory, step = self.cost_model.memory, stage.num_chunks
        number = whole_micro_batches(count)

        def free(settings: MemorySettings) -> float:
            return memory.gpu_free_bytes(stage, settings, size, number, gpu_class)

        def full(recomputed: int) -> MemorySettings:
            return replace(host, mode="full", recomputed=min(recomputed, stage.num_layers))

        saved = free(host)
        most = -(-stage.num_layers // step) if "full" in self.space.recompute else 0
        first = free(full(step)) if most else saved
        more = free(full(2 * step)) - first if most > 1 else 0.0
        least = 0 if saved >= 0 else 1
        if saved < 0 and first < 0:
            least = 1 + math.ceil(-first / more) if more > 0 else most + 1
        common = {"num_gpus": len(gpu_class.ranks), "num_layers": stage.num_layers, "step": step}
        if least <= most:
            yield _Option(
                settings=host,
                **common,
                least=least,
                most=most,
                saved_bytes=saved,
                first_bytes=first,
                more_bytes=more,
            )
        if (
            "selective" in self.space.recompute
            and memory.recompute_savings(gpu_class.kind, "selective") > 0
        ):
            selective = replace(host, mode="selective", recomputed=stage.num_layers)
            saved = free(selective)
            if saved >= 0:
                yield _Option(
                    settings=selective,
                    **common,
                    least=0,
                    most=0,
                    saved_bytes=saved,
                    first_bytes=saved,
                    more_bytes=0.0,
                )


def _numbers(
    chosen: Sequence[_Option], order: Iterator[int] | range, needed: float
) -> list[int] | None:
    """Recomputed layers of each class, more than the least for one after the other; None where all
    do not suffice."""
    numbers = [option.least for option in chosen]
    free = sum(option.free_bytes(option.least) for option in chosen)
    for at in order:
        if free >= needed:
            break
        option = chosen[at]
        others = free - option.free_bytes(numbers[at])
        numbers[at] = option.enough(needed - others)
        free = others + option.free_bytes(numbers[at])
    return numbers if free >= needed else None
