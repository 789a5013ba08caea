"""What a simulation found: the iteration, each rank's time and host memory, the critical path."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from zorse_megatron.costs.process_memory import pinned_bytes, pinned_state_bytes
from zorse_megatron.schedule.actions import TRANSFERS
from zorse_megatron.schedule.transfer_windows import most_away
from zorse_megatron.simulate.memory_ledger import (
    MemoryStep,
    PeakMemory,
    memory_over_time,
    peak_memory,
)
from zorse_megatron.simulate.tasks import NOTHING, Program, Role, Timeline, Track
from zorse_megatron.trace import Span

# How each rank spent its time.


Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class RankUsage:
    """Parts of one rank's iteration; they add up to it."""

    busy_s: float
    """Forwards, backwards, optimizer step."""
    communication_s: float
    """Stopped while a collective (or a swap of the tied embedding) of its own was running."""
    wait_s: float
    """Stopped for other ranks, or for copies to and from the host."""
    idle_s: float
    """After the end of its list."""


def usage_of(timeline: Timeline, rank: int) -> RankUsage:
    """Split the rank's iteration up."""
    track, times = timeline.program.tracks[rank], timeline.times
    computing = list(_computing(timeline, rank))
    communicating = [(times.start_s[task], times.end_s[task]) for task in track.communication]
    # All that must be done before the rank is through; sends leave before they arrive.
    own = (*track.main, *track.copies.values(), *(track.tasks[position] for position in track.own))
    ends_s = [times.end_s[task] for task in own]
    end_s = max([*ends_s, *(stop_s for _, stop_s in communicating)], default=0.0)
    computing_s = busy_s(timeline, rank)
    communication_s = max(0.0, _covered_s([*computing, *communicating]) - computing_s)
    return RankUsage(
        busy_s=computing_s,
        communication_s=communication_s,
        wait_s=max(0.0, end_s - computing_s - communication_s),
        idle_s=timeline.end_s - end_s,
    )


def busy_s(timeline: Timeline, rank: int) -> float:
    """How long the rank computes."""
    return sum(stop_s - start_s for start_s, stop_s in _computing(timeline, rank))


def _computing(timeline: Timeline, rank: int) -> Iterator[Interval]:
    roles, times = timeline.program.graph.roles, timeline.times
    for task in timeline.program.tracks[rank].main:
        if roles[task] is Role.COMPUTE:
            yield times.start_s[task], times.end_s[task]


def _covered_s(intervals: Iterable[Interval]) -> float:
    """Length of what lies in any of the intervals."""
    total_s = last_s = 0.0
    for start_s, stop_s in sorted(intervals):
        total_s += max(0.0, stop_s - max(start_s, last_s))
        last_s = max(last_s, stop_s)
    return total_s


# The critical path: backwards from the end, always to the last dependency to finish.


class Reason(StrEnum):
    """Why an action on the critical path did not start earlier."""

    START = "it starts the iteration"
    SAME_RANK = "the rank did what precedes it in its list"
    DATA = "the data had to arrive"
    SENDER = "the sender had to come so far"
    RECEIVER = "the receiver had to come so far"
    SAME_PAIR = "the transfer before it between the same ranks was under way"
    LAST_RANK = "this rank of the group had to come so far"
    COLLECTIVE = "a collective of its group was under way"
    COPY = "a copy to or from the host was under way"


@dataclass(frozen=True, kw_only=True)
class CriticalStep:
    """One action on the critical path. It starts when the step before it ends."""

    rank: int
    """Of a transfer: the sender; of a collective: the rank that came last."""
    action: str
    start_s: float
    end_s: float
    reason: Reason
    """Why it did not start earlier."""
    contention_s: float = 0.0
    """How much longer it took than on idle links."""


def critical_path(timeline: Timeline) -> tuple[CriticalStep, ...]:
    """The steps in the order of time. Without gaps: their durations add up to the iteration.

    Tasks that take no time are left out, but for the last.
    """
    times = timeline.times
    if not times.end_s:
        return ()
    task = max(range(len(times.end_s)), key=times.end_s.__getitem__)
    steps: list[CriticalStep] = []
    while task != NOTHING:
        if times.end_s[task] > times.start_s[task] or not steps:
            steps.append(_step(timeline, task))
        task = times.cause[task]
    return tuple(reversed(steps))


def _step(timeline: Timeline, task: int) -> CriticalStep:
    graph, times = timeline.program.graph, timeline.times
    cause = times.cause[task]
    rank, _ = graph.owner[task]
    if graph.roles[task] is Role.COLLECTIVE and cause != NOTHING:
        rank = graph.owner[cause][0]
    took_s = times.end_s[task] - times.start_s[task]
    flow = graph.flows[task]
    alone_s = graph.seconds_s[task]
    if flow is not None:
        alone_s += flow.num_bytes / flow.limit_bytes_per_s
    return CriticalStep(
        rank=rank,
        action=timeline.program.word(task),
        start_s=times.start_s[task],
        end_s=times.end_s[task],
        reason=_reason(timeline.program, task, cause),
        contention_s=max(0.0, took_s - alone_s) if flow is not None else 0.0,
    )


_BEHIND = {
    Role.TRANSFER: Reason.DATA,
    Role.COLLECTIVE: Reason.COLLECTIVE,
    Role.COPY: Reason.COPY,
    Role.COMPUTE: Reason.SAME_RANK,
}
"""Why something on a rank's own streams waited, by what it waited for."""


def _reason(program: Program, task: int, cause: int) -> Reason:
    graph = program.graph
    if cause == NOTHING:
        return Reason.START
    if graph.roles[task] is Role.COLLECTIVE:
        return Reason.LAST_RANK
    if graph.roles[task] is not Role.TRANSFER:
        return _BEHIND[graph.roles[cause]]
    if graph.roles[cause] is Role.TRANSFER:
        return Reason.SAME_PAIR
    return Reason.SENDER if graph.owner[cause][0] == graph.owner[task][0] else Reason.RECEIVER


# Simulated actions in the shape in which the runtime records them.


def spans_of(timeline: Timeline, rank: int) -> tuple[Span, ...]:
    """One span per action, in the order of the rank's list.

    A span starts when nothing of the rank's own was left to wait for, and `waited_s` is the time
    from there until all that comes from other ranks was there, as in an executed trace.
    """
    track = timeline.program.tracks[rank]
    return tuple(_span(timeline, track, position) for position in range(len(track.actions)))


def _span(timeline: Timeline, track: Track, position: int) -> Span:
    action = track.actions[position]
    times = timeline.times
    if action.kind in TRANSFERS:  # only started here, which takes no time
        start_s = end_s = timeline.reached_s(track, position)
        waited_s = 0.0
    else:
        start_s = timeline.ready_s(track, position)
        task = track.tasks[position]
        end_s = times.end_s[task]
        gates = track.gates.get(position)
        gate = max(gates, key=times.end_of) if gates else track.first_task(position)
        waited_s = max(0.0, times.start_s[gate] - start_s)
    return Span(step=0, action=str(action), start_s=start_s, end_s=end_s, waited_s=waited_s)


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
        return tuple(peak.total_bytes for peak in self.memory)

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

    def memory_over_time(self, rank: int) -> tuple[MemoryStep, ...]:
        """Bytes on the rank's GPU after each change, by category."""
        return memory_over_time(self.timeline, self.stands_in[rank])

    def _simulated(self, rank: int) -> int:
        if self.stands_in[rank] != rank:
            raise ValueError(
                f"rank {rank} was not simulated: rank {self.stands_in[rank]} stands in for it. "
                "Simulate with merge_equal_ranks=False for the spans of every rank"
            )
        return rank


# Host memory by rank: the counterpart of the plan's offload settings.
#
# In blocks of pinned memory, as a run on GPUs allocates them (`runtime.host_link`): for each chunk
# one with its shard of parameters, one with that of gradients, one for each kind of optimizer
# state, one for each tensor that layers keep of a micro-batch: their inputs only, if all are
# recomputed.


STATE, ACTIVATIONS, PARAMETERS = "optimizer state", "activations", "parameters"
GRADIENTS = "gradients"


def host_bytes(result: SimulationResult, rank: int) -> Mapping[str, int]:
    """Category -> bytes of a rank that wait in the host at most; empty where nothing does."""
    timeline = result.timeline
    stand_in = result.stands_in[rank]
    offload = timeline.sizes.settings[stand_in].offload
    found = {}
    if offload.optimizer_state:
        found[STATE] = _state_bytes(timeline, stand_in)
    if offload.activations:
        found[ACTIVATIONS] = _activation_bytes(timeline, stand_in)
    if offload.parameters:
        sizes = timeline.sizes
        found[PARAMETERS] = sum(
            pinned_bytes(sizes.memory_of(chunk).parameter_bytes(sizes.shards[chunk][stand_in]))
            for chunk in sizes.chunks(stand_in)
        )
    if offload.gradients:
        residency = timeline.program.tracks[stand_in].residency
        found[GRADIENTS] = sum(
            pinned_bytes(residency.shard_of_gradients(chunk))
            for chunk in residency.gradients_in_host
        )
    return found


def _state_bytes(timeline: Timeline, rank: int) -> int:
    sizes = timeline.sizes
    owned = {chunk: sizes.shards[chunk][rank] for chunk in sizes.chunks(rank)}
    return sum(
        pinned_state_bytes(sizes.memory_of(chunk).state_bytes(number), number)
        for chunk, number in owned.items()
    )


def _activation_bytes(timeline: Timeline, rank: int) -> int:
    sizes = timeline.sizes
    saved = {
        chunk: sum(map(pinned_bytes, sizes.saved_tensors(rank, chunk)))
        for chunk in sizes.chunks(rank)
    }
    return most_away(timeline.program.tracks[rank].actions, saved)
