"""Where a search's candidates come from: groupings, and partitions of device orders."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Literal

from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup, DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.groupings.proposals import GroupingProposal
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchProgress
from zorse_megatron.planner.search.costed import CostedCandidates, ScheduleChoice
from zorse_megatron.planner.search.device_order_search import DeviceOrderSearch
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.group_orders import orders
from zorse_megatron.planner.search.groupings import EVERY_PARTITION_UP_TO, Groupings

CandidateSource = Literal["groupings", "device orders"]
_CHUNKS = {"1f1b": (1,), "interleaved": (1, 2), "breadth_first": (1, 2, 4)}
_FEW_GPUS = 16  # up to which more numbers of chunks are tried
_SMALL_CHUNK = 2  # layers
_QUICK_LEVELS = (2, 4)
_TURNS = 3  # of looking around the best groupings


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Costs candidates of either source."""

    inputs: Inputs
    effort: Effort
    estimator: Estimator
    costed_candidates: CostedCandidates
    device_groups: DeviceGroups
    groupings: Groupings
    report: Callable[[SearchProgress], None]

    def cost(self, source: CandidateSource) -> None:
        """Cost what comes from a source."""
        if source == "groupings":
            self._cost_proposals(self._promising())
        else:
            self._partition_device_orders()

    # Groupings.

    def _promising(self) -> list[GroupingProposal]:
        """The groupings that are worth a closer look."""
        rows = self.groupings.start(self.effort.listed)
        self.report(SearchProgress(phase="grouping", done=1, total=1 + _TURNS))
        costed: dict[tuple[tuple[int, ...], ...], tuple[float, GroupingProposal]] = {}

        def cost(found: list[tuple[float, GroupingProposal]], most: int) -> None:
            feasible = 0
            for tries, (_, proposal) in enumerate(found, start=1):
                estimate = self._quick(proposal)
                if estimate is not None:
                    feasible += 1
                    costed[proposal.grouping] = (estimate.iteration_s, proposal)
                if feasible >= most or tries >= 2 * most:
                    return

        cost(rows, self.effort.costed)
        for turn in range(_TURNS):
            self.report(SearchProgress(phase="grouping", done=1 + turn, total=1 + _TURNS))
            best = sorted(costed.values(), key=lambda row: (row[0], row[1].grouping))
            for _, proposal in best[: max(1, self.effort.widened // 2)]:
                near = self.groupings.around(proposal.grouping, 2 * self.effort.costed)
                cost(near, max(2, self.effort.costed // 4))
        best = sorted(costed.values(), key=lambda row: (row[0], row[1].grouping))
        chosen = [proposal for _, proposal in best[: self.effort.widened]]
        # All GPUs in one group may fit in ways that are not tried to see what is promising.
        plain = [
            proposal
            for _, proposal in rows
            if proposal.origin in ("together", "by kind", "by node") or len(proposal.grouping) == 1
        ]
        return list(dict.fromkeys([*chosen, *plain]))

    def _quick_ways(self) -> list[ScheduleChoice]:
        """One with little to recompute, and two that fit where memory is short."""
        schedules = self.inputs.space.schedules
        first = [name for name in ("1f1b", "interleaved") if name in schedules][:1]
        ways = [(name, 1) for name in first]
        return ways + [("breadth_first", n) for n in (2, 4) if "breadth_first" in schedules]

    def _quick(self, proposal: GroupingProposal) -> Estimate | None:
        groups = [self.device_groups.of(group) for group in proposal.grouping]
        found: list[Estimate] = []
        for device_groups in orders(self.inputs, groups)[: self.effort.quick_orders]:
            for levels, way in product((_QUICK_LEVELS, (1,)), self._quick_ways()):
                new = [
                    estimate
                    for level in self.levels(levels)
                    for estimate in self.estimator.best(
                        self.candidate(device_groups, level, way, proposal.origin)
                    )
                ]
                found += new
                if new:
                    break
        return min(found, key=lambda estimate: estimate.iteration_s, default=None)

    def in_order(self, proposal: GroupingProposal) -> tuple[DeviceGroup, ...]:
        """A candidate's groups in the first of the orders worth trying."""
        return orders(self.inputs, [self.device_groups.of(group) for group in proposal.grouping])[0]

    def levels(self, wanted: tuple[int, ...]) -> list[int]:
        """Micro-batch levels, as far as they are allowed; 1 where none is."""
        most = self.inputs.space.max_micro_batch_size or wanted[-1]
        most = min(most, self.inputs.global_batch_size)
        return [level for level in wanted if level <= most] or [1]

    @staticmethod
    def candidate(
        device_groups: tuple[DeviceGroup, ...], level: int, way: ScheduleChoice, origin: str
    ) -> Candidate:
        """All groups at one level."""
        return Candidate(
            device_groups=device_groups,
            levels=(level,) * len(device_groups),
            schedule=way[0],
            num_chunks=way[1],
            origin=origin,
        )

    def ways(self, num_groups: int) -> list[ScheduleChoice]:
        """Schedules and numbers of chunks."""
        return [
            (schedule, chunks)
            for schedule in self.inputs.space.schedules
            for chunks in self._numbers_of_chunks(schedule, num_groups)
        ]

    def _numbers_of_chunks(self, schedule: str, num_groups: int) -> tuple[int, ...]:
        """Interleaved also with chunks of about two layers: the fewer, the shorter the bubble."""
        inputs, usual = self.inputs, _CHUNKS[schedule]
        if schedule != "interleaved" or num_groups == 1 or inputs.world_size > _FEW_GPUS:
            return usual
        small = -(-inputs.num_layers // (num_groups * _SMALL_CHUNK))
        return (*usual, *sorted({each for each in (4, small) if each > usual[-1]}))

    def _cost_proposals(self, found: list[GroupingProposal]) -> None:
        """Cost groupings in all ways."""
        for number, proposal in enumerate(found):
            self.report(SearchProgress(phase="costing", done=number, total=len(found)))
            groups = [self.device_groups.of(group) for group in proposal.grouping]
            for device_groups in orders(self.inputs, groups)[: self.effort.orders]:
                for way in self.ways(len(device_groups)):
                    for level in self.levels(self.effort.levels):
                        candidate = self.candidate(device_groups, level, way, proposal.origin)
                        for slack in self.effort.slacks if way[0] == "1f1b" else (1.0,):
                            self.costed_candidates.cost(replace(candidate, slack=slack))
                if len(device_groups) == 1 and "breadth_first" in self.inputs.space.schedules:
                    self._cost_layer_by_layer(device_groups)

    def _cost_layer_by_layer(self, device_groups: tuple[DeviceGroup, ...]) -> None:
        """One group with a chunk for every layer or two: what Cephalo does."""
        for chunks in (self.inputs.num_layers, -(-self.inputs.num_layers // 2)):
            for level in self.levels(self.effort.levels):
                way = ("breadth_first", chunks)
                self.costed_candidates.cost(self.candidate(device_groups, level, way, "together"))

    # Device orders.

    def _partition_device_orders(self) -> None:
        """Partitions of device orders, where there are too many GPUs for every grouping."""
        if self.inputs.world_size <= EVERY_PARTITION_UP_TO:
            return
        for number, schedule in enumerate(("1f1b", "interleaved")):
            self.report(SearchProgress(phase="partitioning", done=number, total=2))
            if schedule in self.inputs.space.schedules:
                search = DeviceOrderSearch(
                    self.estimator,
                    self.device_groups,
                    nested=schedule == "1f1b",
                    most_groups=self.groupings.most,
                )
                for candidate in islice(search.candidates(), self.effort.partitions):
                    self.costed_candidates.cost(candidate)
