"""How each rank spent its time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zorse_megatron.simulate.task_graph import Role, Track
from zorse_megatron.simulate.timeline import Timeline

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

    @property
    def busy_fraction(self) -> float:
        """Share of the iteration in which the rank computed."""
        whole_s = self.busy_s + self.communication_s + self.wait_s + self.idle_s
        return self.busy_s / whole_s if whole_s else 0.0


def usage_of(timeline: Timeline, rank: int) -> RankUsage:
    """Split the rank's iteration up."""
    track, times = timeline.program.tracks[rank], timeline.times
    computing_s = busy_s(timeline, rank)
    end_s = max((times.end_s[task] for task in _tasks(track)), default=0.0)
    stopped = list(_between(_computing(timeline, rank), end_s))
    communicating = sorted((times.start_s[t], times.end_s[t]) for t in track.communication)
    communication_s = _overlap_s(stopped, _merged(communicating))
    return RankUsage(
        busy_s=computing_s,
        communication_s=communication_s,
        wait_s=max(0.0, end_s - computing_s - communication_s),
        idle_s=timeline.end_s - end_s,
    )


def busy_s(timeline: Timeline, rank: int) -> float:
    """How long the rank computes."""
    return sum(stop_s - start_s for start_s, stop_s in _computing(timeline, rank))


def _tasks(track: Track) -> Iterator[int]:
    """All that must be done before the rank is through; sends leave before they arrive."""
    yield from track.main
    yield from track.communication
    yield from track.copies.values()
    for position in track.own:
        yield track.tasks[position]


def _computing(timeline: Timeline, rank: int) -> Iterator[Interval]:
    roles, times = timeline.program.graph.roles, timeline.times
    for task in timeline.program.tracks[rank].main:
        if roles[task] is Role.COMPUTE:
            yield times.start_s[task], times.end_s[task]


def _between(intervals: Iterable[Interval], end_s: float) -> Iterator[Interval]:
    """The gaps from 0 to `end_s` that the sorted, disjoint intervals leave."""
    last_s = 0.0
    for start_s, stop_s in intervals:
        if start_s > last_s:
            yield last_s, start_s
        last_s = max(last_s, stop_s)
    if end_s > last_s:
        yield last_s, end_s


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted intervals, with those that overlap joined."""
    merged: list[Interval] = []
    for start_s, stop_s in intervals:
        if merged and start_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop_s)
        else:
            merged.append((start_s, stop_s))
    return merged


def _overlap_s(first: list[Interval], second: list[Interval]) -> float:
    """Length of what is in both of two sorted lists of disjoint intervals."""
    total_s, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        start_s = max(first[i][0], second[j][0])
        stop_s = min(first[i][1], second[j][1])
        total_s += max(0.0, stop_s - start_s)
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total_s
