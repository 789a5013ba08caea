"""What a simulation found, from the whole iteration down to single actions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from zorse_megatron.simulate.critical_path import CriticalStep, critical_path
from zorse_megatron.simulate.memory_timeline import (
    MemoryStep,
    PeakMemory,
    memory_over_time,
    peak_bytes,
    peak_memory,
)
from zorse_megatron.simulate.recorded_spans import TransferSpan, spans_of, transfers_of
from zorse_megatron.simulate.timeline import Timeline
from zorse_megatron.simulate.usage import RankUsage, busy_s, usage_of
from zorse_megatron.trace import Span, Trace

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One simulated iteration. Time 0 is its start.

    What is derived from the timeline is found when it is asked for: a search that simulates many
    plans asks for the peaks alone.
    """

    iteration_s: float
    """From the start until every rank has run its list and every transfer has arrived."""
    tokens_per_s: float
    stands_in: tuple[int, ...]
    """Global rank -> the rank that was simulated for it: itself, unless equal ranks were merged."""
    timeline: Timeline = field(repr=False, compare=False)
    """All tasks and their times."""

    @cached_property
    def usage(self) -> tuple[RankUsage, ...]:
        """Global rank -> what it did with its time."""
        return self._of_each(usage_of)

    @cached_property
    def memory(self) -> tuple[PeakMemory, ...]:
        """Global rank -> its peaks."""
        return self._of_each(peak_memory)

    @cached_property
    def critical_path(self) -> tuple[CriticalStep, ...]:
        """Actions, each of which had to wait for the one before, from the start to the end."""
        return critical_path(self.timeline)

    @cached_property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak of each global rank, as in `Predictions.peak_memory_bytes`."""
        return self._of_each(peak_bytes)

    @property
    def most_busy_s(self) -> float:
        """How long the busiest rank computes."""
        return max(busy_s(self.timeline, rank) for rank in self.simulated_ranks)

    def _of_each(self, find: Callable[[Timeline, int], Found]) -> tuple[Found, ...]:
        """Global rank -> what is found of the rank that stands in for it."""
        found = {rank: find(self.timeline, rank) for rank in self.timeline.program.tracks}
        return tuple(found[rank] for rank in self.stands_in)

    @property
    def simulated_ranks(self) -> tuple[int, ...]:
        """Ranks that have spans: all, unless equal ranks were merged."""
        return tuple(sorted(self.timeline.program.tracks))

    def spans(self, rank: int) -> tuple[Span, ...]:
        """One span per action of the rank's list, in list order, as a run records them.

        Actions that do not stop the main stream may reach into the spans after them.
        """
        return spans_of(self.timeline, self._simulated(rank))

    @cached_property
    def traces(self) -> Mapping[int, tuple[Span, ...]]:
        """Spans of every simulated rank."""
        return {rank: self.spans(rank) for rank in self.simulated_ranks}

    def transfers(self) -> tuple[TransferSpan, ...]:
        """All point-to-point transfers between simulated ranks."""
        return transfers_of(self.timeline)

    def memory_over_time(self, rank: int) -> tuple[MemoryStep, ...]:
        """Bytes on the rank's GPU after each change, by category."""
        return memory_over_time(self.timeline, self.stands_in[rank])

    def save_traces(self, directory: Path, ranks: Iterable[int] | None = None) -> list[Path]:
        """Write `trace-rank<rank>.json` files as a training run does."""
        paths = []
        for rank in self.simulated_ranks if ranks is None else ranks:
            trace = Trace()
            trace.add(self.spans(rank))
            paths.append(trace.save(directory, rank=rank))
        return paths

    def _simulated(self, rank: int) -> int:
        if self.stands_in[rank] != rank:
            raise ValueError(
                f"rank {rank} was not simulated: rank {self.stands_in[rank]} stands in for it. "
                "Simulate with merge_equal_ranks=False for the spans of every rank"
            )
        return rank
