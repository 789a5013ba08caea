"""A simulated iteration as a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Format: the "Trace Event Format" of Chromium's catapult project, as JSON. One process for each rank
with a thread for each stream: the main stream, collectives, copies, and each peer that it sends
to. Arrows lead from a transfer to the computation that consumes it; a counter shows the memory.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from zorse_megatron.files.read_write import write_text
from zorse_megatron.schedule.actions import COMPUTE, RECEIVES, SENDS, TRANSFERS, Action, Kind
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.tasks import Track
from zorse_megatron.trace import Span

_MAIN, _COLLECTIVES, _TO_HOST, _FROM_HOST, _FIRST_PEER = range(5)
_THREAD_NAMES = ("main", "collectives", "copies to host", "copies from host")
_THREAD_OF = {
    Kind.REDUCE_GRAD: _COLLECTIVES,
    Kind.UNSHARD: _COLLECTIVES,
    Kind.OFFLOAD: _TO_HOST,
    Kind.OFFLOAD_GRAD: _TO_HOST,
    Kind.FETCH: _FROM_HOST,
}

Event = dict[str, Any]


def chrome_trace(result: SimulationResult, ranks: Iterable[int] | None = None) -> dict[str, Any]:
    """The trace as JSON values. `ranks`: only these; all that were simulated if it is left out."""
    shown = tuple(result.simulated_ranks if ranks is None else ranks)
    events = [event for rank in shown for event in _rank_events(result, rank, set(shown))]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def save_chrome_trace(
    path: Path, result: SimulationResult, ranks: Iterable[int] | None = None
) -> Path:
    """Write the trace and return its path."""
    return write_text(path, json.dumps(chrome_trace(result, ranks)), parents=True)


def _rank_events(result: SimulationResult, rank: int, shown: set[int]) -> Iterator[Event]:
    timeline = result.timeline
    track = timeline.program.tracks[rank]
    peers = sorted({a.peer for a in track.actions if a.kind in SENDS and a.peer is not None})
    yield from _names(result, rank, peers)
    for action, span in zip(track.actions, result.spans(rank), strict=True):
        if action.kind not in TRANSFERS:
            yield from _slices(rank, action, span)
    for position, task in track.copies.items():
        forward = track.actions[position].kind is Kind.FORWARD
        yield _slice(
            rank=rank,
            thread=_TO_HOST if forward else _FROM_HOST,
            name=f"activations of {track.actions[position]}",
            start_s=timeline.times.start_s[task],
            end_s=timeline.times.end_s[task],
        )
    computed = {a.computation: at for at, a in enumerate(track.actions) if a.kind in COMPUTE}
    for position, action in enumerate(track.actions):
        if action.kind in SENDS:
            assert action.peer is not None
            thread = _FIRST_PEER + peers.index(action.peer)
            yield from _transfer(result, track, position, thread, arrow=action.peer in shown)
        elif action.kind in RECEIVES and action.peer in shown:
            yield _arrow_head(result, track, position, computed[action.computation])
    for step in result.memory_over_time(rank):
        taken = zip(Category, step.by_category_bytes, strict=True)
        yield {
            "ph": "C",
            "name": "memory (bytes)",
            "pid": rank,
            "ts": _us(step.time_s),
            "args": {category.label: num_bytes for category, num_bytes in taken},
        }


def _names(result: SimulationResult, rank: int, peers: list[int]) -> Iterator[Event]:
    sizes = result.timeline.sizes
    number, _ = sizes.group_and_replica[rank]
    name = f"rank {rank} ({sizes.plan.group_name(number)})"
    yield _meta(rank, "process_name", name=name)
    yield _meta(rank, "process_sort_index", sort_index=rank)
    for thread, name in enumerate([*_THREAD_NAMES, *(f"to rank {peer}" for peer in peers)]):
        yield _meta(rank, "thread_name", thread, name=name)
        yield _meta(rank, "thread_sort_index", thread, sort_index=thread)


def _meta(rank: int, kind: str, thread: int = 0, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _slices(rank: int, action: Action, span: Span) -> Iterator[Event]:
    thread = _THREAD_OF.get(action.kind, _MAIN)
    work_s = span.start_s + span.waited_s
    if span.waited_s > 0:
        yield _slice(rank=rank, thread=thread, name="wait", start_s=span.start_s, end_s=work_s)
    yield _slice(rank=rank, thread=thread, name=span.action, start_s=work_s, end_s=span.end_s)


def _slice(*, rank: int, thread: int, name: str, start_s: float, end_s: float) -> Event:
    category = "wait" if name == "wait" else "work"
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": thread,
        "ts": _us(start_s),
        "dur": max(0.0, round(_us(end_s) - _us(start_s), 3)),
    }


def _transfer(
    result: SimulationResult, track: Track, position: int, thread: int, *, arrow: bool
) -> Iterator[Event]:
    times = result.timeline.times
    task = track.tasks[position]
    event = _slice(
        rank=track.rank,
        thread=thread,
        name=str(track.actions[position]),
        start_s=times.start_s[task],
        end_s=times.end_s[task],
    )
    yield event
    if arrow:
        yield {**_arrow(task), "ph": "s", "pid": track.rank, "tid": thread, "ts": event["ts"]}


def _arrow_head(result: SimulationResult, track: Track, position: int, consumer: int) -> Event:
    """The end of a transfer's arrow: the computation that consumes it."""
    start_s = result.timeline.times.start_s[track.first_task(consumer)]
    where = {"pid": track.rank, "tid": _MAIN, "ts": _us(start_s)}
    return {**_arrow(track.tasks[position]), "ph": "f", "bp": "e", **where}


def _us(time_s: float) -> float:
    """Microseconds, to the nanosecond: equal moments are equal numbers however they were added."""
    return round(time_s * 1e6, 3)


def _arrow(task: int) -> Event:
    return {"name": "data", "cat": "transfer", "id": task}
