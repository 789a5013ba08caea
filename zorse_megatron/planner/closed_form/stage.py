"""A pipeline stage: a device group with a number of layers, at a position in the pipeline."""

from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, round_samples_of

MicroBatchLevel = int | tuple[int, ...]
"""Largest micro-batch size of a group, or the micro-batch size of each of its GPU classes."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What GPUs of a group do to fit."""

    mode: RecomputeMode = "none"
    recomputed: int = 0
    """Layers (of all its chunks together) that are recomputed."""
    offload_parameters: bool = False
    """Only under breadth_first, which releases them."""
    offload_state: bool = False
    offload_gradients: bool = False
    """Only under breadth_first, which reduces them chunk by chunk."""
    offload_activations: bool = False

    @property
    def offloads_anything(self) -> bool:
        """Whether anything waits in the host."""
        return (
            self.offload_parameters
            or self.offload_state
            or self.offload_gradients
            or self.offload_activations
        )


ClassSettings = tuple[MemorySettings, ...]
"""What each GPU class of a stage does to fit."""


@dataclass(frozen=True, kw_only=True)
class StagePosition:
    """Where a device group stands in the pipeline."""

    is_first: bool
    is_last: bool
    in_flight_limit: float
    """Samples in flight between forwards and backwards, once for each chunk (not breadth_first)."""
    schedule: str = "1f1b"
    num_chunks: int = 1
    slow_before: bool = False
    """Whether the hop from the group before is given in the plan (see `transfer_costs`)."""
    slow_after: bool = False
    """Whether that to the group after is."""


@dataclass(frozen=True)
class Stage:
    """A device group with a number of layers, at a position in the pipeline."""

    device_group: DeviceGroup
    num_layers: int
    sizes: tuple[int, ...]
    """Micro-batch size of each GPU class."""
    position: StagePosition
    reserve_bytes: int = 0
    """To be left free on each GPU, beside the margin."""

    @cached_property
    def num_chunks(self) -> int:
        """No more than there are layers."""
        return min(self.position.num_chunks, self.num_layers)

    @cached_property
    def round_samples(self) -> int:
        """Samples of one micro-batch on every GPU."""
        return round_samples_of(self.device_group, self.sizes)

    def alike(self, settings: MemorySettings) -> ClassSettings:
        """The same settings for all GPU classes."""
        return (settings,) * len(self.device_group.gpu_classes)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for stages that cost the same."""
        return (
            self.device_group.look,
            self.num_layers,
            self.sizes,
            self.position,
            self.reserve_bytes,
        )
