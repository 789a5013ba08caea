"""Memory settings that are tried for a stage, the same for all GPU classes: cheapest first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zorse_megatron.costs.stage_formulas import kept_bytes
from zorse_megatron.planner.closed_form.host_settings import host_settings
from zorse_megatron.planner.closed_form.stage import MemorySettings, Stage

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
        alike = self.cost_model.inputs.units.are_cut_alike(stage.device_group.ranks)
        # The runtime keeps shards of unlike replicas on the GPUs.
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
        spares = any(self.memory.spared(kind, "selective") > 0 for kind in kinds)
        if "selective" in space.recompute and spares:
            yield replace(host, mode="selective", recomputed=stage.num_layers)
        if "full" in space.recompute:
            yield from self._full(stage, counts, host)

    def copies_in_time(self, stage: Stage, settings: MemorySettings) -> bool:
        """Whether the host link takes what a forward keeps in no more than the forward's time."""
        memory = self.memory

        def kept(kind: str) -> int:
            each = memory.kept(kind), memory.kept(kind, settings.mode)
            found: int = kept_bytes(stage.num_layers, settings.recomputed, *each)
            return found

        return all(
            passes.size * kept(gpu_class.kind) / gpu_class.host_link_bytes_per_s <= passes.forward_s
            for gpu_class, passes in zip(
                stage.device_group.gpu_classes,
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
        while low < high:
            middle = (low + high) // 2
            if self._fits(stage, counts, settings(middle)):
                high = middle
            else:
                low = middle + 1
        yield settings(low)

    def _fits(self, stage: Stage, counts: Sequence[float], settings: MemorySettings) -> bool:
        alike = stage.alike(settings)
        if settings.offload_activations and not self.copies_in_time(stage, settings):
            return False
        enough = self.memory.free_bytes(stage, counts, alike) >= 0
        return enough and self.cost_model.host.holds(stage, counts, alike)
