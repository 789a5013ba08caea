"""Computations of tensor-parallel sets: one task for all ranks of a set.

The set's collectives are inside, so it starts when all of its ranks are ready and takes as long as
on the slowest of them.
"""

from zorse_megatron.schedules.actions import Action
from zorse_megatron.simulate.simulation_errors import SimulationError
from zorse_megatron.simulate.task_graph import Role, TaskGraph


class SetTasks:
    """Makes the task when the first rank of a set joins; the others wait for it too."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self._tasks: dict[tuple[tuple[int, ...], Action], int] = {}
        self._joined: dict[tuple[tuple[int, ...], Action], int] = {}

    def join(
        self,
        ranks: tuple[int, ...],
        action: Action,
        owner: tuple[int, int],
        seconds_s: float,
        *after: int,
    ) -> int:
        """Let a rank of a set take part in a computation that takes it `seconds_s`."""
        key = ranks, action
        if key not in self._tasks:
            self._tasks[key] = self.graph.add(owner, Role.COMPUTE, 0.0)
        task = self._tasks[key]
        for earlier in after:
            self.graph.order(earlier, task)
        self.graph.seconds_s[task] = max(self.graph.seconds_s[task], seconds_s)
        self._joined[key] = self._joined.get(key, 0) + 1
        return task

    def check(self) -> None:
        """Raise SimulationError where a rank that others wait for does not take part."""
        for (ranks, action), joined in self._joined.items():
            if joined != len(ranks):
                raise SimulationError(
                    f"found {action} in the lists of {joined} ranks; expected it on all of "
                    f"{list(ranks)}, as they compute together"
                )
