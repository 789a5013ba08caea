"""A simulated program: tasks, their times, and their sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.simulate.engine import TaskTimes
from zorse_megatron.simulate.rank_sizes import RankSizes
from zorse_megatron.simulate.task_graph import Program, Track


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that reports are derived from."""

    program: Program
    times: TaskTimes
    sizes: RankSizes
    fixed_bytes: Sequence[int]
    """Global rank -> bytes that are always taken."""
    forward_only: bool

    @cached_property
    def end_s(self) -> float:
        """When the last task ended."""
        return max(self.times.end_s, default=0.0)

    def reached_s(self, track: Track, position: int) -> float:
        """When the rank's main stream came to the action."""
        return self.times.end_of(track.before[position])

    def ready_s(self, track: Track, position: int) -> float:
        """When nothing of the rank's own was left to wait for."""
        reached_s = self.reached_s(track, position)
        return max([reached_s, *map(self.times.end_of, track.own.get(position, ()))])
