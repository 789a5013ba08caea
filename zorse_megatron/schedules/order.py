"""The order in which replicas run their micro-batches, found by playing the pipeline once.

List scheduling on exact integer time: each replica, whenever it is free, runs its next backward if
that is possible, otherwise its next forward if it has fewer micro-batches in flight than its
limit. Time is the plan's own hypothesis that the work is balanced: a replica with n micro-batches
takes 1/n of a unit for each, one third of it forward. With equal groups and the limits of
`one_f_one_b`, this is Megatron's 1F1B (`forward_backward_pipelining_without_interleaving`).

If every replica waits at its limit, which unequal groups can bring about, the limit that holds
back the earliest samples is raised by one. So the play always ends, and what it plays can be
executed: see `validate`.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorse_megatron.schedules.samples import MicroBatch, Piece, pieces


@dataclass(frozen=True, kw_only=True)
class Event:
    """One forward or backward that starts at `time` (in units of no meaning outside)."""

    time: int
    end: int
    chunk: int
    forward: bool
    micro_batch: MicroBatch


@dataclass(kw_only=True)
class _Worker:
    """One replica of one chunk, while the pipeline is played."""

    chunk: int
    queue: tuple[MicroBatch, ...]
    forward_cost: int
    limit: int
    forwarded: int = 0
    backwarded: int = 0
    busy: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.chunk, self.queue[0].replica

    @property
    def in_flight(self) -> int:
        return self.forwarded - self.backwarded


class Pipeline:
    """A chain of chunks, one group each, played forward in time."""

    def __init__(
        self,
        layouts: Sequence[tuple[MicroBatch, ...]],
        limits: Sequence[dict[int, int]],
        *,
        forward_only: bool,
    ) -> None:
        """`layouts[c]`: chunk c's micro-batches; `limits[c][replica]`: most in flight."""
        self.forward_only = forward_only
        self.last = len(layouts) - 1
        counts = [self._count(layout) for layout in layouts]
        unit = math.lcm(*(n for by_replica in counts for n in by_replica.values()))
        self.workers = {
            (chunk, replica): _Worker(
                chunk=chunk,
                queue=tuple(m for m in layouts[chunk] if m.replica == replica),
                forward_cost=unit // n,
                limit=limits[chunk][replica],
            )
            for chunk, by_replica in enumerate(counts)
            for replica, n in by_replica.items()
        }
        self.changed = set(self.workers)
        """Workers that something happened to: only these can have become able to start."""
        links = [pieces(a, b) for a, b in pairwise(layouts)]
        self.missing_forward = self._dependencies(links, upstream=True)
        self.missing_backward = self._dependencies(links, upstream=False)
        self.feeds: dict[tuple[int, MicroBatch], list[MicroBatch]] = {}
        self.fed_by: dict[tuple[int, MicroBatch], list[MicroBatch]] = {}
        for chunk, link in enumerate(links):
            for piece in link:
                self.feeds.setdefault((chunk, piece.source), []).append(piece.target)
                self.fed_by.setdefault((chunk + 1, piece.target), []).append(piece.source)

    @staticmethod
    def _count(layout: tuple[MicroBatch, ...]) -> dict[int, int]:
        counts: dict[int, int] = {}
        for micro_batch in layout:
            counts[micro_batch.replica] = counts.get(micro_batch.replica, 0) + 1
        return counts

    @staticmethod
    def _dependencies(
        links: Sequence[tuple[Piece, ...]], *, upstream: bool
    ) -> dict[tuple[int, MicroBatch], int]:
        """How many neighbours each micro-batch still waits for."""
        missing: dict[tuple[int, MicroBatch], int] = {}
        for chunk, link in enumerate(links):
            for piece in link:
                key = (chunk + 1, piece.target) if upstream else (chunk, piece.source)
                missing[key] = missing.get(key, 0) + 1
        return missing

    def play(self) -> Iterator[Event]:
        """Yield all events by start time. Complexity: O(events x log events)."""
        running: list[tuple[int, int, int, Event]] = []
        now = 0
        remaining = sum(len(w.queue) for w in self.workers.values()) * (2 - self.forward_only)
        while remaining or running:
            for event in self._startable(now):
                remaining -= 1
                heapq.heappush(running, (event.end, event.chunk, event.micro_batch.replica, event))
                yield event
            if not running:
                self._raise_limit()
                continue
            now = running[0][0]
            while running and running[0][0] == now:
                self._finish(heapq.heappop(running)[3])

    def _startable(self, now: int) -> Iterator[Event]:
        # The last chunk first: its backwards are what all others wait for.
        candidates = sorted(self.changed, key=lambda key: (-key[0], key[1]))
        self.changed.clear()
        for chunk, replica in candidates:
            worker = self.workers[chunk, replica]
            if worker.busy:
                continue
            if self._can_backward(worker):
                micro_batch, cost, forward = worker.queue[worker.backwarded], 2, False
            elif self._can_forward(worker) and (
                self.forward_only or worker.in_flight < worker.limit
            ):
                micro_batch, cost, forward = worker.queue[worker.forwarded], 1, True
            else:
                continue
            worker.busy = True
            yield Event(
                time=now,
                end=now + cost * worker.forward_cost,
                chunk=chunk,
                forward=forward,
                micro_batch=micro_batch,
            )

    def _can_forward(self, worker: _Worker) -> bool:
        if worker.forwarded == len(worker.queue):
            return False
        return not self.missing_forward.get((worker.chunk, worker.queue[worker.forwarded]), 0)

    def _can_backward(self, worker: _Worker) -> bool:
        if self.forward_only or worker.backwarded == worker.forwarded:
            return False
        return not self.missing_backward.get((worker.chunk, worker.queue[worker.backwarded]), 0)

    def _finish(self, event: Event) -> None:
        worker = self.workers[event.chunk, event.micro_batch.replica]
        worker.busy = False
        self.changed.add(worker.key)
        if event.forward:
            worker.forwarded += 1
            for target in self.feeds.get((event.chunk, event.micro_batch), ()):
                self.missing_forward[event.chunk + 1, target] -= 1
                self.changed.add((event.chunk + 1, target.replica))
        else:
            worker.backwarded += 1
            for source in self.fed_by.get((event.chunk, event.micro_batch), ()):
                self.missing_backward[event.chunk - 1, source] -= 1
                self.changed.add((event.chunk - 1, source.replica))

    def _raise_limit(self) -> None:
        """Let the replica go on whose next samples are the earliest; there always is one."""
        waiting = [w for w in self.workers.values() if self._can_forward(w)]
        earliest = min(waiting, key=lambda w: (w.queue[w.forwarded].start, -w.chunk))
        earliest.limit = earliest.in_flight + 1
        self.changed.add(earliest.key)
