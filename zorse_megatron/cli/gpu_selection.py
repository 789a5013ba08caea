"""`zorse plan` on as many GPUs as are worth it: the search, and their cluster file."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.gpus.gpu import DTYPE_OF, common_dtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import USED_GPUS, dump_cluster, with_gpus
from zorse_megatron.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import StockAtBest, StockLayout, StockSearches
    from zorse_megatron.planner.gpu_selection import Point
    from zorse_megatron.planner.inputs.search_inputs import Inputs
    from zorse_megatron.planner.outcome import NoPlanError, Outcome, Strategy


_MAX_NODES = 3
CostsOf = Callable[[Cluster], WorkloadCosts]
OnProgress = Callable[[Any], None] | None
"""Takes a `SearchProgress`, whose module only the search imports."""


@dataclass(frozen=True, kw_only=True)
class StockFound:
    """What stock Megatron takes, and its best layout as a plan."""

    at_best: "StockAtBest"
    plan: Plan | None
    """Of the GPUs that the layout uses; None: none fits."""
    cluster_text: str | None
    """The cluster file of these GPUs; None where they are all."""


@dataclass(frozen=True, kw_only=True)
class Selected:
    """GPUs of a cluster, and the plan that was found for them."""

    costs: WorkloadCosts
    """On these GPUs."""
    outcome: "Outcome"
    stock: StockFound | None
    """Stock Megatron on the best GPUs of the whole cluster; None: there are too many."""
    point: "Point"
    points: tuple["Point", ...]
    """All selections that got a whole search, best first; that of all GPUs is one of them."""
    whole: Cluster
    cluster_text: str | None
    """The cluster file of these GPUs; None where they are all."""

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks of the whole cluster."""
        return tuple(sorted(set(range(self.whole.world_size)) - set(self.point.ranks)))


def select_gpus(
    costs: WorkloadCosts,
    costs_of: CostsOf,
    strategy: "Strategy",
    on_progress: OnProgress,
    *,
    with_stock: bool = True,
) -> Selected:
    """Search for the GPUs that train fastest, and for their plan. `costs`: on all of them.

    `with_stock`: and for what stock Megatron takes, which the strategies zorse and stock need.
    Raises NoPlanError where nothing fits, that of all GPUs.
    """
    from zorse_megatron.planner.gpu_selection import explore

    searches = _Searches(costs, costs_of, strategy, on_progress, with_stock=with_stock)
    if strategy == "stock":
        return searches.selected(searches.points_of_stock())
    points = explore(
        costs.inputs,
        searches.iteration_s,
        part_of=searches.part_of,
        short=None if strategy == "zorse" else searches.iteration_s,
        stock_s=searches.stock_s() if strategy == "zorse" else None,
        on_progress=on_progress,
    )
    if not points[0].fits:
        assert searches.failure is not None, "each search found a plan or failed"
        raise searches.failure
    return searches.selected(points)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan, and what it is compared with."""

    costs: WorkloadCosts
    """On the GPUs that are used."""
    outcome: "Outcome"
    stock: StockFound | None = None
    """Stock Megatron; None: there are too many GPUs, or it is not asked for."""
    selected: Selected | None = None
    """None: GPUs were not selected, all are used."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the whole cluster, those that are used."""
        return (
            self.selected.point.ranks
            if self.selected
            else tuple(range(self.outcome.plan.world_size))
        )


def find(
    costs: WorkloadCosts,
    costs_of: CostsOf,
    strategy: "Strategy",
    on_progress: OnProgress,
    *,
    may_leave_out: bool,
    with_stock: bool = True,
) -> Found:
    """Search for the plan of all GPUs, or of those that train fastest. `costs`: on all of them.

    `with_stock`: and for what stock Megatron takes. Raises NoPlanError where nothing fits.
    """
    from zorse_megatron.planner.find_plan import find_plan

    if may_leave_out:
        found = select_gpus(costs, costs_of, strategy, on_progress, with_stock=with_stock)
        return Found(costs=found.costs, outcome=found.outcome, stock=found.stock, selected=found)
    if not with_stock:
        outcome = find_plan(costs.inputs, strategy=strategy, on_progress=on_progress)
        return Found(costs=costs, outcome=outcome)
    stock, layouts = _stock_on_all(costs, strategy)
    outcome = find_plan(costs.inputs, strategy=strategy, stock=layouts, on_progress=on_progress)
    return Found(costs=costs, outcome=outcome, stock=stock)


def _stock_on_all(
    costs: WorkloadCosts, strategy: "Strategy"
) -> "tuple[StockFound | None, list[StockLayout]]":
    """What stock takes on all GPUs, and its layouts there, fastest first."""
    from zorse_megatron.planner.baselines.stock_best import (
        MOST_GPUS,
        StockSearches,
        no_stock_layout,
    )

    if strategy != "stock" and costs.inputs.world_size > MOST_GPUS:
        return None, []
    searches, layouts = StockSearches(costs.inputs), []
    at_best = searches.on_all()
    if (best := at_best.best.fitting) is not None:  # perhaps an even one
        layouts = [best, *searches.on(searches.everything)]
    if strategy == "stock" and not layouts:
        raise no_stock_layout(at_best.best)
    plan = layouts[0].plan_on(costs.inputs) if layouts else None
    return StockFound(at_best=at_best, plan=plan, cluster_text=None), layouts


class _Searches:
    """Whole searches on some of the GPUs, each of them once."""

    def __init__(
        self,
        costs: WorkloadCosts,
        costs_of: CostsOf,
        strategy: "Strategy",
        on_progress: OnProgress,
        *,
        with_stock: bool,
    ) -> None:
        self.costs, self.costs_of = costs, costs_of
        self.strategy, self.on_progress, self.with_stock = strategy, on_progress, with_stock
        self.found: dict[tuple[int, ...], tuple[WorkloadCosts, Outcome]] = {}
        self.failure: NoPlanError | None = None
        """The first one."""

    @cached_property
    def stock(self) -> "StockSearches | None":
        """None: there are too many GPUs."""
        from zorse_megatron.planner.baselines.stock_best import MOST_GPUS, StockSearches

        is_large = self.costs.inputs.world_size > MOST_GPUS and self.strategy != "stock"
        if is_large or not self.with_stock:
            return None
        return StockSearches(self.costs.inputs, self.part_of)

    def stock_s(self) -> dict[tuple[int, ...], float]:
        """What stock takes on the sets of GPUs that its layouts were searched on."""
        if self.stock is None:
            return {}
        best = self.stock.at_best().best.fitting
        found = {ranks: some[0].iteration_s for ranks, some in self.stock.found.items() if some}
        return found if best is None else found | {best.gpu_ranks: best.iteration_s}

    def points_of_stock(self) -> tuple["Point", ...]:
        """The sets of GPUs that stock's layouts were searched on, best first."""
        from zorse_megatron.planner.baselines.stock_best import no_stock_layout
        from zorse_megatron.planner.gpu_selection import Point

        if not (found := self.stock_s()):
            assert self.stock is not None, "its layouts are searched on any number of GPUs"
            raise no_stock_layout(self.stock.at_best().best)
        tokens = self.costs.inputs.global_batch_size * self.costs.inputs.sequence_length
        points = [Point(ranks=ranks, iteration_s=s, tokens=tokens) for ranks, s in found.items()]
        return tuple(sorted(points, key=lambda each: (each.iteration_s, each.ranks)))

    def selected(self, points: tuple["Point", ...]) -> Selected:
        """The best of the points, whose plan is searched by then or is now."""
        best = points[0]
        self.iteration_s(best.ranks)
        costs, outcome = self.found[best.ranks]
        return Selected(
            costs=costs,
            outcome=outcome,
            stock=self._stock_found(),
            point=best,
            points=points,
            whole=self.costs.cluster,
            cluster_text=None if costs is self.costs else self.text_of(best.ranks),
        )

    def _stock_found(self) -> StockFound | None:
        if self.stock is None:
            return None
        at_best = self.stock.at_best()
        if (best := at_best.best.fitting) is None:
            return StockFound(at_best=at_best, plan=None, cluster_text=None)
        ranks = best.gpu_ranks
        is_all = len(ranks) == self.costs.cluster.world_size
        return StockFound(
            at_best=at_best,
            plan=best.plan_on(self._costs_on(ranks).inputs),
            cluster_text=None if is_all else self.text_of(ranks),
        )

    def _layouts_on(self, ranks: tuple[int, ...]) -> "list[StockLayout] | None":
        """Stock's, fastest first, for the strategies that start from them."""
        if self.strategy not in {"zorse", "stock"}:
            return None
        if self.stock is None:
            return []
        best = self.stock.at_best().best.fitting  # also if it is an even one
        found = [best] if best is not None and best.gpu_ranks == ranks else []
        return [*found, *self.stock.on(ranks)]

    def iteration_s(self, ranks: tuple[int, ...]) -> float:
        """Infinite where nothing fits."""
        from zorse_megatron.planner.find_plan import find_plan
        from zorse_megatron.planner.outcome import NoPlanError

        if ranks not in self.found:
            costs = self._costs_on(ranks)
            try:
                outcome = find_plan(
                    costs.inputs,
                    strategy=self.strategy,
                    stock=self._layouts_on(ranks),
                    on_progress=self.on_progress,
                )
            except NoPlanError as error:
                self.failure = self.failure or error
                return math.inf
            self.found[ranks] = costs, outcome
        return self.found[ranks][1].iteration_s

    def part_of(self, ranks: tuple[int, ...]) -> "Inputs":
        """What a lower bound and a short search need."""
        from zorse_megatron.planner.inputs.search_inputs import on_ranks

        kinds = {self.costs.cluster.gpu_kinds[rank] for rank in ranks}
        dtype = DTYPE_OF[common_dtype(self.costs.cluster.kinds[kind] for kind in kinds)]
        if self.costs.workload.dtype is None and dtype != self.costs.dtype:
            return self._costs_on(ranks).inputs  # without the kinds that lack a better type
        return on_ranks(self.costs.inputs, ranks)

    def text_of(self, ranks: tuple[int, ...]) -> str:
        """The cluster file of these GPUs."""
        header = f"{USED_GPUS}\nRanks before: {', '.join(map(str, ranks))}"
        return dump_cluster(with_gpus(self.costs.cluster, ranks), header)

    def _costs_on(self, ranks: tuple[int, ...]) -> WorkloadCosts:
        if len(ranks) == self.costs.cluster.world_size:
            return self.costs
        return self.costs_of(with_gpus(self.costs.cluster, ranks))


def gpus_of(cluster: Cluster, ranks: Sequence[int]) -> str:
    """For people: how many of which kind.

    >>> from zorse_megatron.inputs.cluster_yaml import parse_cluster
    >>> gpus_of(parse_cluster(b"nodes: [{gpus: [2 x T4, 1 x L4]}]"), (0, 2))
    '1 T4, 1 L4'
    """
    counts = Counter(cluster.gpu_kinds[rank] for rank in ranks)
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def spares(selected: Selected) -> str:
    """Say which GPUs are left out, of a few nodes."""
    whole = selected.whole
    parts = [
        f"{gpus_of(whole, tuple(ranks))} of node {node}"
        for node, ranks in groupby(
            selected.left_out, key=lambda rank: whole.node_of_rank(rank).name
        )
    ]
    more = f" and of {len(parts) - _MAX_NODES} more nodes" if len(parts) > _MAX_NODES else ""
    return f"left out as spares: {', '.join(parts[:_MAX_NODES])}{more}"
