"""Event-driven execution of tasks: each starts as soon as its dependencies are done.

Event-driven: a heap of ends, and a `Network` that shares links among the flows under way. All ends
of one moment are handled before the links are shared anew. Deterministic: events of equal time are
handled in the order in which they were found. Complexity: O((tasks + waits) x log tasks), and for
each start and end of a flow on full links O(flows that share links with it).
"""

import heapq
from dataclasses import dataclass

from zorse_megatron.schedules.actions import TRANSFERS
from zorse_megatron.simulate.network import Network
from zorse_megatron.simulate.simulation_errors import SimulationError
from zorse_megatron.simulate.task_graph import NOTHING, Program

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
