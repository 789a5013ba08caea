"""A candidate before and after it is costed."""

from dataclasses import dataclass, replace

from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.closed_form.stage import MicroBatchLevel, Stage
from zorse_megatron.planner.closed_form.stage_costs import StageCost


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
    origin: str = ""
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
    loop_s: float
    link_s: float
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
