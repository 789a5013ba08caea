"""Look for selections of GPUs that train faster or cheaper than all of them.

A GPU that is reached over a slow link, or is slow itself, may cost a pipeline more than it brings:
FlashFlex and Sailor leave such GPUs out, too. From all GPUs the search goes to smaller selections,
on from those that no other one beats, and skips what a lower bound of the iteration says cannot be
worth it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from zorse_megatron.planner.baselines.link_bound import link_bound
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.other_gpus import on_ranks
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchProgress, Strategy
from zorse_megatron.planner.planner_errors import NoPlanError
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.zorse import search
from zorse_megatron.planner.selection.fewer import Selection, fewer
from zorse_megatron.planner.selection.points import Objective, Point, frontier, is_beaten

Evaluate = Callable[[Inputs], float]
"""Iteration of the best plan for some GPUs; infinite where nothing fits."""
Report = Callable[[SearchProgress], None]

_MOST_OF_FEW, _MOST_OF_MANY = 48, 16  # selections that are searched
_FEW_GPUS = 32
_FASTEST = Objective()


def explore(
    inputs: Inputs,
    evaluate: Evaluate,
    *,
    objective: Objective,
    prices_per_hour: Sequence[float] | None = None,
    on_progress: Report | None = None,
) -> tuple[Point, ...]:
    """Return the selections that were searched, best first; that of all GPUs is one of them.

    `prices_per_hour`: rank -> price of the GPU; None: none are known.
    """
    return _Exploration(
        inputs, evaluate, objective, prices_per_hour, on_progress or (lambda progress: None)
    ).run()


def short_search(strategy: Strategy, on_progress: Report | None = None) -> Evaluate:
    """Return an evaluation by a part of the usual search; of a baseline, by all of its search."""
    report = on_progress or (lambda progress: None)

    def evaluate(inputs: Inputs) -> float:
        if strategy != "zorse":
            try:
                return find_plan(inputs, strategy=strategy).iteration_s
            except NoPlanError:
                return math.inf
        found = search(inputs, report, Effort.of(inputs).light).evaluations
        return min((each.iteration_s for each in found), default=math.inf)

    return evaluate


class _Exploration:
    def __init__(
        self,
        inputs: Inputs,
        evaluate: Evaluate,
        objective: Objective,
        prices_per_hour: Sequence[float] | None,
        report: Report,
    ) -> None:
        self.inputs, self.evaluate, self.objective = inputs, evaluate, objective
        self.prices_per_hour, self.report = prices_per_hour, report
        self.most = _MOST_OF_FEW if inputs.world_size <= _FEW_GPUS else _MOST_OF_MANY
        self.points: dict[Selection, Point] = {}
        self.seen: set[Selection] = set()

    def run(self) -> tuple[Point, ...]:
        everything = tuple(range(self.inputs.world_size))
        self._try(everything)
        expanded: set[Selection] = set()
        while len(self.points) < self.most:
            # Where nothing fits on all GPUs, it may where a small one need not hold a layer.
            best = frontier(self.points.values()) or list(self.points.values())
            fresh = [point for point in best if point.ranks not in expanded]
            if not fresh:
                break
            # In turns the best and the fastest, so that both ends of the frontier are looked at.
            order = (self.objective, _FASTEST)[len(expanded) % 2]
            point = min(fresh, key=order.rank)
            expanded.add(point.ranks)
            for optimistic in sorted(self._fewer(point), key=self.objective.rank):
                if len(self.points) < self.most and not is_beaten(optimistic, self.points.values()):
                    self._try(optimistic.ranks)
        return tuple(sorted(self.points.values(), key=self.objective.rank))

    def _fewer(self, point: Point) -> list[Point]:
        """New selections, each as fast as the bound of its GPUs."""
        found = []
        for ranks in fewer(self.inputs, point.ranks):
            if ranks not in self.seen:
                self.seen.add(ranks)
                bound_s = link_bound(on_ranks(self.inputs, ranks)).bound_s
                found.append(self._point(ranks, bound_s))
        return found

    def _try(self, ranks: Selection) -> None:
        phase = f"{len(ranks)} of {self.inputs.world_size} GPUs"
        self.report(SearchProgress(phase=phase, done=len(self.points), total=self.most))
        part = self.inputs if len(ranks) == self.inputs.world_size else on_ranks(self.inputs, ranks)
        self.points[ranks] = self._point(ranks, self.evaluate(part))

    def _point(self, ranks: Selection, iteration_s: float) -> Point:
        price = self.prices_per_hour
        point = Point(
            ranks=ranks,
            iteration_s=iteration_s,
            tokens=self.inputs.global_batch_size * self.inputs.sequence_length,
        )
        if price is None:
            return point
        return replace(point, price_per_hour=sum(price[rank] for rank in ranks))
