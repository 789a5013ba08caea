"""Replicas of several ranks: one rank of each tensor-parallel set stands for all.

For runs of other frameworks whose layers were measured in sets of one size, with the set's
collectives in them (`scripts.validation`). Of this project's runtime every rank is simulated.

The ranks of a set run the same actions at the same times: the costs of computations with
`tensor_parallel` set are those of one rank, with the set's own collectives inside. So the plan is
lowered with one rank per replica, and the first rank of each replica is simulated. What the ranks
of a set put on the network together is the business of the `CommCost`
(`scripts.validation.device_sets`).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.schedules.actions import Action, ActionLists
from zorse_megatron.schema.plan.plan import Plan, Replica
from zorse_megatron.simulate.equal_ranks import EqualRanks
from zorse_megatron.simulate.network_loads import EqualLinks
from zorse_megatron.simulate.simulation_errors import SimulationError


@dataclass(frozen=True, kw_only=True)
class RankSets:
    """A plan's tensor-parallel sets, all of the same size and one after the other."""

    plan: Plan
    size: int

    @classmethod
    def of(cls, plan: Plan) -> "RankSets":
        """Find the sets. Raises SimulationError where they differ in size or are not aligned."""
        size = len(plan.groups[0].replicas[0].ranks)
        for where, replica in _replicas(plan):
            first = replica.ranks[0]
            if replica.unequal_parts is not None:
                raise SimulationError(
                    f"{where} has unequal parts; expected equal ones where one rank stands for all"
                )
            if replica.ranks != tuple(range(first, first + size)) or first % size:
                raise SimulationError(
                    f"{where} has ranks {replica.ranks}; expected {size} ranks in a row that start "
                    f"at a multiple of {size}, as in the first replica, where one rank stands for "
                    "a set"
                )
        return cls(plan=plan, size=size)

    def one_rank_each(self) -> Plan:
        """The plan that is lowered: replica n * size ... becomes rank n."""
        if self.size == 1:
            return self.plan
        groups = tuple(
            dataclasses.replace(
                group,
                replicas=tuple(
                    dataclasses.replace(replica, ranks=(replica.ranks[0] // self.size,))
                    for replica in group.replicas
                ),
            )
            for group in self.plan.groups
        )
        return dataclasses.replace(self.plan, groups=groups, cluster=None, predictions=None)

    def stand_ins(self, lists: ActionLists) -> EqualRanks:
        """Name the ranks of `one_rank_each`'s lists as the plan does."""
        if self.size == 1:
            return EqualRanks.all_different(self.plan, lists)
        return EqualRanks(
            lists={
                rank * self.size: tuple(map(self._renamed, actions))
                for rank, actions in enumerate(lists.ranks)
            },
            stands_in=tuple(rank - rank % self.size for rank in range(self.plan.world_size)),
            links=EqualLinks(),
        )

    def _renamed(self, action: Action) -> Action:
        if action.peer is None:
            return action
        return dataclasses.replace(action, peer=action.peer * self.size)


def _replicas(plan: Plan) -> Iterator[tuple[str, Replica]]:
    for number, group in enumerate(plan.groups):
        for index, replica in enumerate(group.replicas):
            yield f"groups[{number}].replicas[{index}]", replica
