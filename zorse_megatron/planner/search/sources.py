"""Where a search's plans come from: groupings of nodes and GPUs, and cuts of lines."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Literal

from zorse_megatron.planner.closed_form.candidate import Estimate, Outline
from zorse_megatron.planner.closed_form.device_groups import Team, Teams
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.groupings.candidates import Candidate
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import Progress
from zorse_megatron.planner.search.costed import Estimates, Way
from zorse_megatron.planner.search.device_order_search import LineSearch
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.group_orders import orders
from zorse_megatron.planner.search.groupings import EVERY_PARTITION_UP_TO, Groupings

Source = Literal["groupings", "lines"]
_CHUNKS = {"1f1b": (1,), "interleaved": (1, 2), "breadth_first": (1, 2, 4)}
_QUICK_LEVELS = (2, 4)
_TURNS = 3  # of looking around the best groupings


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Prices plans of either source."""

    inputs: Inputs
    effort: Effort
    estimator: Estimator
    estimates: Estimates
    teams: Teams
    groupings: Groupings
    report: Callable[[Progress], None]

    def price(self, source: Source) -> None:
        """Price what comes from a source."""
        if source == "groupings":
            self._price(self._promising())
        else:
            self._cut_lines()

    # Groupings.

    def _promising(self) -> list[Candidate]:
        """The groupings that are worth a closer look."""
        rows = self.groupings.start(self.effort.listed)
        self.report(Progress(phase="grouping", done=1, total=1 + _TURNS))
        priced: dict[tuple[tuple[int, ...], ...], tuple[float, Candidate]] = {}

        def price(found: list[tuple[float, Candidate]], most: int) -> None:
            feasible = 0
            for tries, (_, candidate) in enumerate(found, start=1):
                estimate = self._quick(candidate)
                if estimate is not None:
                    feasible += 1
                    priced[candidate.grouping] = (estimate.iteration_s, candidate)
                if feasible >= most or tries >= 2 * most:
                    return

        price(rows, self.effort.priced)
        for turn in range(_TURNS):
            self.report(Progress(phase="grouping", done=1 + turn, total=1 + _TURNS))
            best = sorted(priced.values(), key=lambda row: (row[0], row[1].grouping))
            for _, candidate in best[: max(1, self.effort.widened // 2)]:
                near = self.groupings.around(candidate.grouping, 2 * self.effort.priced)
                price(near, max(2, self.effort.priced // 4))
        best = sorted(priced.values(), key=lambda row: (row[0], row[1].grouping))
        chosen = [candidate for _, candidate in best[: self.effort.widened]]
        plain = [row[1] for row in rows if row[1].origin in ("together", "by kind", "by node")]
        return list(dict.fromkeys([*chosen, *plain]))

    def _quick_ways(self) -> list[Way]:
        """One with little to recompute, and two that fit where memory is short."""
        schedules = self.inputs.space.schedules
        first = [name for name in ("1f1b", "interleaved") if name in schedules][:1]
        ways = [(name, 1) for name in first]
        return ways + [("breadth_first", n) for n in (2, 4) if "breadth_first" in schedules]

    def _quick(self, candidate: Candidate) -> Estimate | None:
        groups = [self.teams.of(group) for group in candidate.grouping]
        found: list[Estimate] = []
        for teams in orders(self.inputs, groups)[: self.effort.quick_orders]:
            for levels, way in product((_QUICK_LEVELS, (1,)), self._quick_ways()):
                new = [
                    estimate
                    for level in self.levels(levels)
                    for estimate in self.estimator.best(
                        self.outline(teams, level, way, candidate.origin)
                    )
                ]
                found += new
                if new:
                    break
        return min(found, key=lambda estimate: estimate.iteration_s, default=None)

    def in_order(self, candidate: Candidate) -> tuple[Team, ...]:
        """A candidate's groups in the first of the orders worth trying."""
        return orders(self.inputs, [self.teams.of(group) for group in candidate.grouping])[0]

    def levels(self, wanted: tuple[int, ...]) -> list[int]:
        """Micro-batch levels, as far as they are allowed; 1 where none is."""
        most = self.inputs.space.max_micro_batch_size or wanted[-1]
        most = min(most, self.inputs.global_batch_size)
        return [level for level in wanted if level <= most] or [1]

    @staticmethod
    def outline(teams: tuple[Team, ...], level: int, way: Way, origin: str) -> Outline:
        """All groups at one level."""
        return Outline(
            teams=teams,
            levels=(level,) * len(teams),
            schedule=way[0],
            num_chunks=way[1],
            origin=origin,
        )

    def ways(self) -> list[Way]:
        """Schedules and numbers of chunks."""
        return [
            (schedule, chunks)
            for schedule in self.inputs.space.schedules
            for chunks in _CHUNKS[schedule]
        ]

    def _price(self, found: list[Candidate]) -> None:
        """Price groupings in all ways."""
        for number, candidate in enumerate(found):
            self.report(Progress(phase="pricing", done=number, total=len(found)))
            groups = [self.teams.of(group) for group in candidate.grouping]
            for teams in orders(self.inputs, groups)[: self.effort.orders]:
                for way in self.ways():
                    for level in self.levels(self.effort.levels):
                        outline = self.outline(teams, level, way, candidate.origin)
                        for slack in self.effort.slacks if way[0] == "1f1b" else (1.0,):
                            self.estimates.price(replace(outline, slack=slack))
                if len(teams) == 1 and "breadth_first" in self.inputs.space.schedules:
                    self._price_layer_by_layer(teams)

    def _price_layer_by_layer(self, teams: tuple[Team, ...]) -> None:
        """One group with a chunk for every layer or two: what Cephalo does."""
        for chunks in (self.inputs.num_layers, -(-self.inputs.num_layers // 2)):
            for level in self.levels(self.effort.levels):
                way = ("breadth_first", chunks)
                self.estimates.price(self.outline(teams, level, way, "together"))

    # Lines.

    def _cut_lines(self) -> None:
        """Groups cut out of lines of all GPUs, where there are too many for every partition."""
        if self.inputs.world_size <= EVERY_PARTITION_UP_TO:
            return
        for number, schedule in enumerate(("1f1b", "interleaved")):
            self.report(Progress(phase="cutting", done=number, total=2))
            if schedule in self.inputs.space.schedules:
                search = LineSearch(
                    self.estimator,
                    self.teams,
                    nested=schedule == "1f1b",
                    most_groups=self.groupings.most,
                )
                for outline in islice(search.outlines(), self.effort.cuts):
                    self.estimates.price(outline)
