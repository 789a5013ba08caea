"""Collectives: one task for all ranks that take part."""

from collections.abc import Iterable, Mapping, Sequence

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.layer_gathers import GatherPart
from zorse_megatron.simulate.network_loads import TaskWork
from zorse_megatron.simulate.simulation_errors import SimulationError
from zorse_megatron.simulate.task_graph import NOTHING, Role, TaskGraph

CollectiveKey = tuple[Kind, int | None, int, int]
"""Kind, chunk (None: the whole world), how many of these came before in the list, and the first of
the ranks that take part.

STEP stands for what is told behind the update: of the world, or of the last group (its chunk).
"""


class CollectiveTasks:
    """Makes the task when the first rank joins; the others wait for it too."""

    def __init__(
        self,
        graph: TaskGraph,
        costs: ActionCosts,
        lists: Mapping[int, Sequence[Action]],
        stands_in: Sequence[int],
    ) -> None:
        """`stands_in`: rank -> that of the lists' ranks which stands for it."""
        self.graph = graph
        self.costs = costs
        self.ranks = lists.keys()
        self.tasks: dict[CollectiveKey, tuple[int, ...]] = {}
        self.joined: dict[CollectiveKey, int] = {}
        self.stages: dict[tuple[CollectiveKey, str], int] = {}
        self.stands_in = tuple(stands_in)
        self.loss_message = NOTHING

    def join(self, key: CollectiveKey, owner: tuple[int, int], *after: int) -> int:
        """Let a rank take part in the collective."""
        if key not in self.tasks:
            self._begin(key, owner, [self._work(key)])
        return self._join(key, *after)[-1]

    def join_gather(
        self, key: CollectiveKey, owner: tuple[int, int], parts: Sequence[GatherPart], *after: int
    ) -> tuple[int, ...]:
        """The same of a GATHER: a task for each part, one after the other."""
        if key not in self.tasks:
            _, chunk, _, first = key
            assert chunk is not None
            peers = self.costs.sizes.peers_of(first, chunk)
            self._begin(key, owner, self.costs.gather_in_parts(chunk, peers, parts))
        return self._join(key, *after)

    def _begin(self, key: CollectiveKey, owner: tuple[int, int], works: Iterable[TaskWork]) -> None:
        tasks = [NOTHING]
        for work in works:
            tasks.append(self.graph.add_work(owner, Role.COLLECTIVE, work, tasks[-1]))
        self.tasks[key] = tuple(tasks[1:])

    def _join(self, key: CollectiveKey, *after: int) -> tuple[int, ...]:
        tasks = self.tasks[key]
        for earlier in after:
            self.graph.order(earlier, tasks[0])
        self.joined[key] = self.joined.get(key, 0) + 1
        return tasks

    def join_stage(
        self, key: CollectiveKey, stage: str, owner: tuple[int, int], work: TaskWork, *after: int
    ) -> int:
        """Let a rank take part in a stage of a collective, which may be one of its region."""
        if (key, stage) not in self.stages:
            self.stages[key, stage] = self.graph.add_work(owner, Role.COLLECTIVE, work)
        for earlier in after:
            self.graph.order(earlier, self.stages[key, stage])
        return self.stages[key, stage]

    def note_stages(self, key: CollectiveKey) -> None:
        """A rank has joined all stages of a collective that are its own."""
        self.joined[key] = self.joined.get(key, 0) + 1

    def tell_loss(self, owner: tuple[int, int], after: int) -> int:
        """Send the loss to the job's last rank, or wait for it; returns what a rank waits for."""
        plan, (rank, _) = self.costs.sizes.plan, owner
        ranks, last = plan.groups[plan.chunks[-1].group].ranks, plan.world_size - 1
        source, target = self.stands_in[ranks[0]], self.stands_in[last]
        if self.costs.sizes.framework.sums_after_step or last in ranks:
            return after
        if rank not in (source, target):
            return after
        if self.loss_message == NOTHING:
            seconds_s = self.costs.loss_message_s(ranks[0], last)
            self.loss_message = self.graph.add(owner, Role.COLLECTIVE, seconds_s)
        self.graph.order(after, self.loss_message)
        return self.loss_message if rank == target else after

    def _work(self, key: CollectiveKey) -> TaskWork:
        kind, chunk, _, first = key
        if chunk is not None:
            peers = self.costs.sizes.peers_of(first, chunk)
            if kind is Kind.STEP:
                return self.costs.loss(peers)
            return self.costs.collective(kind, chunk, peers)
        if kind is Kind.SCALE:
            return self.costs.at_scale()
        return self.costs.report() if kind is Kind.STEP else self.costs.statistics()

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
