"""Collectives: one task for all ranks that take part."""

from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.network_loads import TaskWork
from zorse_megatron.simulate.simulation_errors import SimulationError
from zorse_megatron.simulate.task_graph import Role, TaskGraph

CollectiveKey = tuple[Kind, int | None, int, int]
"""Kind, chunk (None: the whole world), how many of these came before in the list, and the first of
the ranks that take part.

A STEP has two collectives of the world: for the norm, and for the report after the list.
"""


class CollectiveTasks:
    """Makes the task when the first rank joins; the others wait for it too."""

    def __init__(
        self, graph: TaskGraph, costs: ActionCosts, lists: Mapping[int, Sequence[Action]]
    ) -> None:
        self.graph = graph
        self.costs = costs
        self.ranks = lists.keys()
        self.tasks: dict[CollectiveKey, int] = {}
        self.joined: dict[CollectiveKey, int] = {}

    def join(self, key: CollectiveKey, owner: tuple[int, int], *after: int) -> int:
        """Let a rank take part in the collective."""
        if key not in self.tasks:
            self.tasks[key] = self.graph.add_work(owner, Role.COLLECTIVE, self._work(key))
        for earlier in after:
            self.graph.order(earlier, self.tasks[key])
        self.joined[key] = self.joined.get(key, 0) + 1
        return self.tasks[key]

    def _work(self, key: CollectiveKey) -> TaskWork:
        kind, chunk, number, first = key
        if chunk is not None:
            return self.costs.collective(kind, chunk, self.costs.sizes.peers_of(first, chunk))
        if kind is Kind.SCALE:
            return self.costs.statistics(self.costs.sizes.framework.sums_at_scale)
        return self.costs.report() if number else self.costs.statistics()

    def check(self) -> None:
        """Raise SimulationError where a rank that others wait for does not take part."""
        for (kind, chunk, _, first), joined in self.joined.items():
            members = set(self.ranks)
            if chunk is not None:
                members &= set(self.costs.sizes.peers_of(first, chunk))
            if joined != len(members):
                word = kind if chunk is None else f"{chunk}{kind}"
                raise SimulationError(
                    f"found {word} in the lists of {joined} ranks; expected it on all "
                    f"{len(members)}, as they would wait for each other"
                )
