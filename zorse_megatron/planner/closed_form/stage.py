"""What is priced: a team with a number of layers, at a place, and what it does to fit."""

from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.planner.closed_form.device_groups import Team, round_of

Level = int | tuple[int, ...]
"""Largest micro-batch size of a group, or the micro-batch size of each of its cells."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a group does to fit."""

    mode: RecomputeMode = "none"
    recomputed: int = 0
    """Layers (of all its chunks together) that are recomputed."""
    offload_state: bool = False
    offload_activations: bool = False


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a team stands in the pipeline."""

    is_first: bool
    is_last: bool
    window: float
    """Samples in flight between forwards and backwards, once for each chunk (not breadth_first)."""
    schedule: str = "1f1b"
    num_chunks: int = 1
    slow_before: bool = False
    """Whether the hop from the group before is given in the plan (see `hops`)."""
    slow_behind: bool = False
    """Whether that to the group behind is."""


@dataclass(frozen=True)
class Job:
    """What is priced: a team with a number of layers, at a place."""

    team: Team
    num_layers: int
    sizes: tuple[int, ...]
    """Micro-batch size of each cell."""
    place: Place
    reserve_bytes: int = 0
    """To be left free on each GPU, beside the margin."""

    @property
    def num_chunks(self) -> int:
        """No more than there are layers."""
        return min(self.place.num_chunks, self.num_layers)

    @cached_property
    def round_samples(self) -> int:
        """Samples of one micro-batch on every GPU."""
        return round_of(self.team, self.sizes)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for jobs that cost the same."""
        return self.team.look, self.num_layers, self.sizes, self.place, self.reserve_bytes
