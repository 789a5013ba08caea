"""Computations of tensor-parallel sets: one task for all ranks of a set.

The set's collectives are inside, so it starts when all of its ranks are ready. They end the
attention and the MLP of each layer, and embedding and head: each of these takes as long as on the
rank that is slowest there, which with unequal parts need not be one rank.
"""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import Action
from zorse_megatron.simulate.simulation_errors import SimulationError
from zorse_megatron.simulate.task_graph import Role, TaskGraph


class SetTasks:
    """Makes the task when the first rank of a set joins; the others wait for it too."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self._tasks: dict[tuple[tuple[int, ...], Action, int], int] = {}
        self._joined: dict[tuple[tuple[int, ...], Action, int], int] = {}
        self._slowest_s: dict[int, list[float]] = {}
        """By task: of each phase."""

    def join(
        self,
        ranks: tuple[int, ...],
        action: Action,
        owner: tuple[int, int],
        phases_s: Sequence[float],
        inside_s: float,
        *after: int,
        part: int = 0,
    ) -> int:
        """Let a rank of a set take part in a computation, or in one of its parts.

        `phases_s`: what it computes between collectives; `inside_s`: what these take.
        """
        key = ranks, action, part
        if key not in self._tasks:
            self._tasks[key] = self.graph.add(owner, Role.COMPUTE, 0.0)
        task = self._tasks[key]
        for earlier in after:
            self.graph.order(earlier, task)
        slowest_s = self._slowest_s.setdefault(task, [0.0] * len(phases_s))
        slowest_s[:] = map(max, slowest_s, phases_s)
        self.graph.seconds_s[task] = sum(slowest_s) + inside_s
        self._joined[key] = self._joined.get(key, 0) + 1
        return task

    def check(self) -> None:
        """Raise SimulationError where a rank that others wait for does not take part."""
        for (ranks, action, _), joined in self._joined.items():
            if joined != len(ranks):
                raise SimulationError(
                    f"found {action} in the lists of {joined} ranks; expected it on all of "
                    f"{list(ranks)}, as they compute together"
                )
