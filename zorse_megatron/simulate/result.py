"""What a simulation found, from the whole iteration down to single actions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from zorse_megatron.simulate.critical_path import CriticalStep
from zorse_megatron.simulate.memory_timeline import MemoryStep, PeakMemory, memory_over_time
from zorse_megatron.simulate.recorded_spans import TransferSpan, spans_of, transfers_of
from zorse_megatron.simulate.timeline import Timeline
from zorse_megatron.simulate.usage import RankUsage
from zorse_megatron.trace import Span, Trace


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One simulated iteration. Time 0 is its start."""

    iteration_s: float
    """From the start until every rank has run its list and every transfer has arrived."""
    tokens_per_s: float
    usage: tuple[RankUsage, ...]
    """Global rank -> what it did with its time."""
    memory: tuple[PeakMemory, ...]
    """Global rank -> its peaks."""
    critical_path: tuple[CriticalStep, ...]
    """Actions, each of which had to wait for the one before, from the start to the end."""
    stands_in: tuple[int, ...]
    """Global rank -> the rank that was simulated for it: itself, unless equal ranks were merged."""
    timeline: Timeline = field(repr=False, compare=False)
    """All tasks and their times, from which the rest is derived when it is asked for."""

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """Peak of each global rank, as in `Predictions.peak_memory_bytes`."""
        return tuple(peak.total_bytes for peak in self.memory)

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
