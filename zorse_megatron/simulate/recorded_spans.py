"""Simulated actions in the shape in which the runtime records them."""

from dataclasses import dataclass

from zorse_megatron.schedules.actions import SENDS, TRANSFERS
from zorse_megatron.simulate.task_graph import Track
from zorse_megatron.simulate.timeline import Timeline
from zorse_megatron.trace import Span


@dataclass(frozen=True, kw_only=True)
class TransferSpan:
    """One transfer, from when both ends had started it until it arrived."""

    source: int
    target: int
    action: str
    """The sender's word for it."""
    num_bytes: int
    start_s: float
    end_s: float


def spans_of(timeline: Timeline, rank: int, *, step: int = 0) -> tuple[Span, ...]:
    """One span per action, in the order of the rank's list.

    A span starts when nothing of the rank's own was left to wait for, and `waited_s` is the time
    from there until all that comes from other ranks was there, as in an executed trace.
    """
    track = timeline.program.tracks[rank]
    return tuple(
        _span(timeline, track, position, step=step) for position in range(len(track.actions))
    )


def _span(timeline: Timeline, track: Track, position: int, *, step: int) -> Span:
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
    return Span(step=step, action=str(action), start_s=start_s, end_s=end_s, waited_s=waited_s)


def transfers_of(timeline: Timeline) -> tuple[TransferSpan, ...]:
    """All transfers between chunks, by sender and in the order of its list."""
    times, sizes = timeline.times, timeline.sizes
    found = []
    for rank, track in timeline.program.tracks.items():
        for position, action in enumerate(track.actions):
            if action.kind not in SENDS:
                continue
            assert action.peer is not None
            task = track.tasks[position]
            found.append(
                TransferSpan(
                    source=rank,
                    target=action.peer,
                    action=str(action),
                    num_bytes=sizes.message_bytes(action),
                    start_s=times.start_s[task],
                    end_s=times.end_s[task],
                )
            )
    return tuple(found)
