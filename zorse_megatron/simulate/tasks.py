"""Tasks, their dependencies and streams, and their event-driven execution.

Every task starts as soon as all tasks that it waits for are done. Streams, on which tasks run one
after the other, are chains of such waits.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from zorse_megatron.schedule.actions import TRANSFERS, Action
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.network import Flow, Network, TaskWork
from zorse_megatron.simulate.rank_bytes import RankSizes
from zorse_megatron.simulate.residency import Residency

NOTHING = -1
"""In place of a task where there is none; nothing is waited for."""
REPORT = "REPORT"
"""In place of an action: what all ranks are told after their lists."""


class Role(IntEnum):
    """What a task occupies."""

    COMPUTE = 0
    TRANSFER = 1
    COLLECTIVE = 2
    COPY = 3


class TaskGraph:
    """All tasks; each is known by its number."""

    def __init__(self) -> None:
        self.seconds_s: list[float] = []
        """Duration; of a flow: the latency that follows it."""
        self.flows: list[Flow | None] = []
        self.waits_for: list[int] = []
        """How many tasks each waits for."""
        self.waiting: list[list[int]] = []
        """The tasks that wait for each."""
        self.owner: list[tuple[int, int]] = []
        """(rank, position in its list); of several ranks' task: those of one of them."""
        self.roles: list[Role] = []

    def add(self, owner: tuple[int, int], role: Role, seconds_s: float, *after: int) -> int:
        """Add a task that takes a fixed time; returns its number."""
        number = len(self.seconds_s)
        self.seconds_s.append(seconds_s)
        self.flows.append(None)
        self.owner.append(owner)
        self.roles.append(role)
        self.waiting.append([])
        count = 0
        for earlier in after:
            if earlier >= 0:
                self.waiting[earlier].append(number)
                count += 1
        self.waits_for.append(count)
        return number

    def add_work(self, owner: tuple[int, int], role: Role, work: TaskWork, *after: int) -> int:
        """Add a task that may put bytes on links."""
        number = self.add(owner, role, work.seconds_s, *after)
        self.flows[number] = work.flow
        return number

    def order(self, earlier: int, later: int) -> None:
        """Let `later` wait for `earlier`, where both are there."""
        if earlier >= 0 and later >= 0:
            self.waiting[earlier].append(later)
            self.waits_for[later] += 1


@dataclass(kw_only=True)
class Track:
    """One rank's list as tasks. Lists are by position in the list."""

    rank: int
    actions: tuple[Action, ...]
    residency: Residency
    """Where its parameters are meanwhile."""
    tasks: list[int] = field(default_factory=list)
    """The task that does the action, or ends it."""
    starts: dict[int, int] = field(default_factory=dict)
    """Position of an action of several tasks -> the first of them."""
    before: list[int] = field(default_factory=list)
    """The last task on the rank's main stream when the action's turn comes."""
    posted_at: Mapping[int, int] = field(default_factory=dict)
    """Position of a receive -> position at whose turn its buffer is opened."""
    waited_at: Mapping[int, int] = field(default_factory=dict)
    """Position of a send -> position at whose turn it must have left."""
    own: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Position -> tasks of this rank beside the main stream that the action waits for."""
    gates: dict[int, list[int]] = field(default_factory=dict)
    """Position -> the communication inside an action, before which it waits for other ranks."""
    main: list[int] = field(default_factory=list)
    """The main stream: tasks that run one after the other and stop whatever follows them."""
    communication: list[int] = field(default_factory=list)
    """Collectives that the rank takes part in, and swaps of the tied embedding."""
    copies: dict[int, int] = field(default_factory=dict)
    """Position of a forward (backward) -> copy of its activations to (from) the host; of a STEP
    -> copies of gradients from the host for their norm."""

    brings: dict[int, int] = field(default_factory=dict)
    """Position of a computation -> that of the backward after it, whose copy begins with it."""
    left: dict[int, int] = field(default_factory=dict)
    """Position of a forward -> the task at whose end its activations are off the GPU."""

    def first_task(self, position: int) -> int:
        """The task that an action begins with."""
        return self.starts.get(position, self.tasks[position])

    def wait_task(self, send: int) -> int:
        """The task that waits until a send has left, or NOTHING."""
        at = self.waited_at.get(send, len(self.actions))
        if at == len(self.actions):
            return NOTHING
        return self.tasks[at]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that is simulated: the tasks of all simulated ranks."""

    graph: TaskGraph
    tracks: Mapping[int, Track]
    capacities_bytes_per_s: tuple[float, ...]

    def word(self, task: int) -> str:
        """The action that a task belongs to, or REPORT."""
        rank, position = self.graph.owner[task]
        actions = self.tracks[rank].actions
        return str(actions[position]) if position < len(actions) else REPORT


def live(tasks: Iterable[int | None]) -> tuple[int, ...]:
    """Tasks only, without placeholders."""
    return tuple(task for task in tasks if task is not None and task >= 0)


# Event-driven execution of tasks: each starts as soon as its dependencies are done.
#
# Event-driven: a heap of ends, and a `Network` that shares links among the flows under way. All
# ends of one moment are handled before the links are shared anew. Deterministic: events of equal
# time are handled in the order in which they were found. Complexity: O((tasks + waits) x log
# tasks), and for each start and end of a flow on full links O(flows that share links with it).


_TASK = -1  # in place of the version of a bundle: the end of a task


@dataclass(frozen=True, kw_only=True)
class TaskTimes:
    """When each task ran, by its number."""

    start_s: list[float]
    end_s: list[float]
    cause: list[int]
    """The task whose end let it start; NOTHING for those that start at once."""

    def end_of(self, task: int) -> float:
        """End of a task; 0 for NOTHING."""
        return self.end_s[task] if task >= 0 else 0.0


def run_program(program: Program) -> TaskTimes:
    """Run all tasks. Raises SimulationError where tasks wait for each other in a circle."""
    execution = _Execution(program)
    execution.run()
    if execution.num_done < len(execution.start_s):
        raise SimulationError(f"no rank can proceed:\n{_where(program, execution)}")
    return TaskTimes(start_s=execution.start_s, end_s=execution.end_s, cause=execution.cause)


class _Execution:
    def __init__(self, program: Program) -> None:
        graph = program.graph
        count = len(graph.seconds_s)
        self.graph = graph
        self.network = Network(program.capacities_bytes_per_s)
        self.start_s = [0.0] * count
        self.end_s = [0.0] * count
        self.cause = [NOTHING] * count
        self.missing = list(graph.waits_for)
        self.waiting, self.flows, self.seconds_s = graph.waiting, graph.flows, graph.seconds_s
        self.num_done = 0
        self.heap: list[tuple[float, int, int, int]] = []
        """(time, order, task, _TASK) or (time, order, bundle, its version)."""
        self.order = 0

    def run(self) -> None:
        for task, missing in enumerate(list(self.missing)):
            if not missing:
                self._start(task, 0.0)
        self._share_links(0.0)
        heap = self.heap
        while heap:
            now_s = heap[0][0]
            while heap and heap[0][0] == now_s:
                _, _, number, version = heapq.heappop(heap)
                if version == _TASK:
                    self._end(number, now_s)
                else:
                    self._end_flows(number, version, now_s)
            if self.network.has_changed:
                self._share_links(now_s)

    def _end_flows(self, bundle: int, version: int, now_s: float) -> None:
        for task in self.network.finish(bundle, version, now_s):
            latency_s = self.seconds_s[task]
            if latency_s:
                self._push(now_s + latency_s, task, _TASK)
            else:
                self._end(task, now_s)

    def _start(self, task: int, now_s: float) -> None:
        self.start_s[task] = now_s
        flow = self.flows[task]
        if flow is None:
            heapq.heappush(self.heap, (now_s + self.seconds_s[task], self.order, task, _TASK))
            self.order += 1
        else:
            self.network.start(task, flow, now_s)

    def _end(self, task: int, now_s: float) -> None:
        self.end_s[task] = now_s
        self.num_done += 1
        missing = self.missing
        for later in self.waiting[task]:
            left = missing[later] = missing[later] - 1
            if not left:
                self.cause[later] = task
                self._start(later, now_s)

    def _share_links(self, now_s: float) -> None:
        for end_s, bundle, version in self.network.rebalance(now_s):
            self._push(end_s, bundle, version)

    def _push(self, time_s: float, number: int, version: int) -> None:
        heapq.heappush(self.heap, (time_s, self.order, number, version))
        self.order += 1


def _where(program: Program, execution: _Execution, most: int = 16) -> str:
    """Where each rank stands: the first action of its list that could not start.

    Sends and receives never stop a rank.
    """
    lines: list[str] = []
    for rank, track in program.tracks.items():
        stuck = next(
            (
                at
                for at, (action, task) in enumerate(zip(track.actions, track.tasks, strict=True))
                if action.kind not in TRANSFERS and execution.missing[task] > 0
            ),
            None,
        )
        if stuck is not None and len(lines) < most:
            words = " ".join(map(str, track.actions[max(0, stuck - 3) : stuck]))
            lines.append(f"rank {rank} at {stuck}: {words} »{track.actions[stuck]}«")
    return "\n".join(lines)


# The streams of a rank, by their last tasks.


class Streams:
    """On each things run one at a time, in list order; the main one runs the list itself."""

    def __init__(self, *, rank: int, graph: TaskGraph, track: Track) -> None:
        self.rank = rank
        self.graph = graph
        self.track = track
        self.main = self.collective = self.to_host = self.from_host = NOTHING
        self.inside = self.between = NOTHING
        """Of a hierarchical group: within its regions, and between them."""

    def run(self, position: int, role: Role, seconds_s: float, *after: int) -> int:
        """Add a task to the main stream, which also waits for `after`."""
        owner = self.rank, position
        return self.on_main(self.graph.add(owner, role, seconds_s, self.main, *after))

    def on_main(self, task: int) -> int:
        """The main stream goes on when a task has ended."""
        self.main = task
        self.track.main.append(task)
        return task


# A simulated program: tasks, their times, and their sizes.


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that reports are derived from."""

    program: Program
    times: TaskTimes
    sizes: RankSizes
    fixed_bytes: Sequence[int]
    """Global rank -> bytes that are always taken."""

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
