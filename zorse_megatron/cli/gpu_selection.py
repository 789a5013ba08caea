"""`zorse plan` on as many GPUs as are worth it: the search, and their cluster file."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import duration
from zorse_megatron.gpus.gpu import DTYPE_OF, common_dtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import USED_GPUS, dump_cluster, with_gpus
from zorse_megatron.log import OnProgress
from zorse_megatron.plan.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import StockAtBest, StockSearches
    from zorse_megatron.planner.baselines.stock_search import StockLayout
    from zorse_megatron.planner.gpu_selection import Point
    from zorse_megatron.planner.inputs.search_inputs import Inputs
    from zorse_megatron.planner.outcome import NoPlanError, Outcome, Strategy


_MAX_NODES = 3
CostsOf = Callable[[Cluster], WorkloadCosts]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A plan, the GPUs that it is for, and what it is compared with."""

    costs: WorkloadCosts
    """On these GPUs."""
    outcome: "Outcome"
    stock: "StockAtBest | None"
    """Stock Megatron on the best GPUs of the whole cluster; None: there are too many, or it is not
    asked for."""
    ranks: tuple[int, ...]
    """Of the whole cluster, those that are used."""
    points: tuple["Point", ...]
    """All selections that got a whole search, best first; that of all GPUs is one of them. Empty:
    GPUs were not selected, all are used."""
    whole: WorkloadCosts
    """On all GPUs."""
    cluster_text: str | None
    """The cluster file of these GPUs; None where they are all."""
    stock_plan: Plan | None = None
    """Stock's best layout, for the GPUs that it uses; None: none fits."""
    stock_cluster_text: str | None = None
    """The cluster file of these GPUs; None where they are all."""

    @property
    def num_gpus(self) -> int:
        """Those of the whole cluster."""
        return self.whole.cluster.world_size

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks of the whole cluster."""
        return tuple(sorted(set(range(self.num_gpus)) - set(self.ranks)))


@dataclass(kw_only=True)
class GpuSearches:
    """Whole searches on some of the GPUs, each of them once."""

    costs: WorkloadCosts
    """On all of them."""
    costs_of: CostsOf
    strategy: "Strategy"
    on_progress: OnProgress | None
    may_leave_out: bool
    """Whether GPUs that slow the others are left out."""
    with_stock: bool
    """Whether to search for what stock Megatron takes, which the strategies zorse and stock need.
    """
    outcomes: dict[tuple[int, ...], tuple[WorkloadCosts, "Outcome"]] = field(default_factory=dict)
    failure: "NoPlanError | None" = None
    """The first one."""

    def find(self) -> Found:
        """Search for the plan of all GPUs, or of those that train fastest.

        Raises NoPlanError where nothing fits, that of all GPUs. Where it is interrupted,
        `found_so_far` has what was found by then, if `outcomes` has any.
        """
        from zorse_megatron.planner.gpu_selection import explore

        if self.strategy == "stock":
            points = self.points_of_stock()
            return self.found_on(points[0].ranks, points if self.may_leave_out else ())
        if not self.may_leave_out:
            return self.found_on(tuple(range(self.costs.cluster.world_size)), ())
        is_ours = self.strategy == "zorse"
        points = explore(
            self.costs.inputs,
            self.iteration_s,
            part_of=self.part_of,
            short=None if is_ours else self.iteration_s,
            stock_s=self.stock_s(as_plans=True) if is_ours else None,
            on_progress=self.on_progress,
        )
        return self.found_on(points[0].ranks, points)

    def found_so_far(self) -> Found:
        """The same of the searches that have found a plan."""
        from zorse_megatron.planner.outcome import CUT_SHORT

        points = self._points(
            {ranks: outcome.iteration_s for ranks, (_, outcome) in self.outcomes.items()}
        )
        found = self.found_on(points[0].ranks, points if self.may_leave_out else ())
        notes = dict.fromkeys((CUT_SHORT, *found.outcome.notes))
        outcome = replace(found.outcome, was_cut_short=True, notes=tuple(notes))
        return replace(found, outcome=outcome)

    @cached_property
    def stock(self) -> "StockSearches | None":
        """None: there are too many GPUs, or it is not asked for."""
        from zorse_megatron.planner.baselines.stock_best import MOST_GPUS, StockSearches

        is_large = self.costs.inputs.world_size > MOST_GPUS and self.strategy != "stock"
        if is_large or not self.with_stock:
            return None
        return StockSearches(self.costs.inputs, self.part_of)

    def _at_best(self, stock: "StockSearches") -> "StockAtBest":
        """Of all sets of GPUs that were searched by now."""
        return stock.at_best() if self.may_leave_out else stock.on_all()

    def stock_s(self, *, as_plans: bool) -> dict[tuple[int, ...], float]:
        """What stock takes on the sets of GPUs that its layouts were searched on; `as_plans`: in
        those layouts that are plans, without expert parallelism."""
        if self.stock is None:
            return {}
        best = self._at_best(self.stock).best.fitting
        layouts = [each for some in self.stock.found.values() for each in some]
        layouts += [best] if best is not None else []
        found: dict[tuple[int, ...], float] = {}
        for each in layouts:
            if each.grid.expert_parallel == 1 or not as_plans:
                before_s = found.get(each.gpu_ranks, math.inf)
                found[each.gpu_ranks] = min(before_s, each.iteration_s)
        return found

    def points_of_stock(self) -> tuple["Point", ...]:
        """The sets of GPUs that stock's layouts were searched on, best first."""
        from zorse_megatron.planner.baselines.stock_best import no_stock_layout

        if not (found := self.stock_s(as_plans=False)):
            assert self.stock is not None, "its layouts are searched on any number of GPUs"
            raise no_stock_layout(self._at_best(self.stock).best)
        return self._points(found)

    def _points(self, iterations_s: dict[tuple[int, ...], float]) -> tuple["Point", ...]:
        """Best first."""
        from zorse_megatron.planner.gpu_selection import Point

        tokens = self.costs.inputs.global_batch_size * self.costs.inputs.sequence_length
        best_first = sorted(iterations_s.items(), key=lambda item: (item[1], item[0]))
        return tuple(Point(ranks=ranks, iteration_s=s, tokens=tokens) for ranks, s in best_first)

    def found_on(self, ranks: tuple[int, ...], points: tuple["Point", ...]) -> Found:
        """The plan of these GPUs, which is searched by then or is now.

        Raises NoPlanError where there is none.
        """
        if not math.isfinite(self.iteration_s(ranks)):
            assert self.failure is not None, "each search found a plan or failed"
            raise self._beside_stock(self.failure)
        costs, outcome = self.outcomes[ranks]
        stock = None if self.stock is None else self._at_best(self.stock)
        layout = None if stock is None else stock.best.fitting
        plan, text = None, None
        if layout is not None:
            plan = layout.plan_on(self._costs_on(layout.gpu_ranks).inputs)
            text = self._text_of(layout.gpu_ranks)
        return Found(
            costs=costs,
            outcome=outcome,
            stock=stock,
            ranks=ranks,
            points=points,
            whole=self.costs,
            cluster_text=self._text_of(ranks),
            stock_plan=plan,
            stock_cluster_text=text,
        )

    def _beside_stock(self, error: "NoPlanError") -> "NoPlanError":
        """Say also what fits of stock's: with expert parallelism, something may."""
        best = None if self.stock is None else self._at_best(self.stock).best.fitting
        if best is None or self.strategy != "zorse":
            return error
        least = " at least" if best.grid.expert_parallel > 1 else ""
        took = f"{duration(best.iteration_s)} per iteration{least}"
        problem = Problem(
            where="stock Megatron",
            found=f"a layout that fits, {best.description}: {took}",
            expected="a plan that fits as well",
            remedy="Train with unmodified Megatron: zorse plan --strategy stock.",
        )
        return error.with_problem(problem)

    def _layouts_on(self, ranks: tuple[int, ...]) -> "list[StockLayout] | None":
        """Stock's, fastest first, for the strategies that start from them; None: of themselves."""
        if self.strategy not in {"zorse", "stock"} or not self.with_stock:
            return None
        if self.stock is None:
            return []
        best = self._at_best(self.stock).best.fitting  # also if it is an even one
        found = [best] if best is not None and best.gpu_ranks == ranks else []
        return [*found, *self.stock.on(ranks)]

    def iteration_s(self, ranks: tuple[int, ...]) -> float:
        """Infinite where nothing fits."""
        from zorse_megatron.planner.find_plan import find_plan
        from zorse_megatron.planner.outcome import NoPlanError, SearchCutShort

        if ranks not in self.outcomes:
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
            except SearchCutShort as cut:
                self.outcomes[ranks] = costs, cut.outcome
                raise
            self.outcomes[ranks] = costs, outcome
        return self.outcomes[ranks][1].iteration_s

    def part_of(self, ranks: tuple[int, ...]) -> "Inputs":
        """What a lower bound and a short search need."""
        from zorse_megatron.planner.inputs.search_inputs import on_ranks

        kinds = {self.costs.cluster.gpu_kinds[rank] for rank in ranks}
        dtype = DTYPE_OF[common_dtype(self.costs.cluster.kinds[kind] for kind in kinds)]
        if self.costs.workload.dtype is None and dtype != self.costs.dtype:
            return self._costs_on(ranks).inputs  # without the kinds that lack a better type
        return on_ranks(self.costs.inputs, ranks)

    def _text_of(self, ranks: tuple[int, ...]) -> str | None:
        """The cluster file of these GPUs; None where they are all."""
        if len(ranks) == self.costs.cluster.world_size:
            return None
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


def spares(found: Found) -> str:
    """Say which GPUs are left out, of a few nodes."""
    whole = found.whole.cluster
    parts = [
        f"{gpus_of(whole, tuple(ranks))} of node {node}"
        for node, ranks in groupby(found.left_out, key=lambda rank: whole.node_of_rank(rank).name)
    ]
    more = f" and of {len(parts) - _MAX_NODES} more nodes" if len(parts) > _MAX_NODES else ""
    return f"left out as spares: {', '.join(parts[:_MAX_NODES])}{more}"
