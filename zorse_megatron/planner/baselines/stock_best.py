"""Stock Megatron at its best: in any layout, and in even ones on all GPUs or the best of them.

One answer for everybody who compares with stock. The simulator runs stock's own 1F1B, whose
transfers stop the ranks (`STOCK_1F1B`), and its interleaved schedule, of whose transfers only the
sends of activations do (`STOCK_INTERLEAVED`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from zorse_megatron.errors import Problem
from zorse_megatron.plan.plan import Plan, Replica
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.baselines.stock_costs import GridEstimate, grid_estimates
from zorse_megatron.planner.baselines.stock_layouts import no_grid, subsets
from zorse_megatron.planner.baselines.stock_search import StockLayout, StockSearch, framework_of
from zorse_megatron.planner.build_plan import sharing_experts
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs, on_ranks
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.simulate_plan import simulate_plan

MOST_GPUS = 256
"""Beyond, searching stock's layouts takes longer than searching for plans."""
# Forwards and backwards of even layouts that may be simulated, on all GPUs and on all smaller sets
# together, and the number of those.
_IN_SHORT = 3_000
_MOST_SETS = 3
# Sets of GPUs, besides all of them, on which uneven layouts are searched: of few GPUs, and of many.
_MOST_SEARCHED, _FEW_GPUS, _MOST_SEARCHED_OF_MANY = 2, 16, 1
_SHARE_OF_FEWER = 0.5  # of the simulations on all GPUs
_MAY_BE_CLOSER = 1.06  # a few layouts are costed, in a closed form that is mostly too short

PartOf = Callable[[tuple[int, ...]], Inputs]
"""The inputs on some GPUs alone, in the order of the cluster."""


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Stock's best layout on one set of GPUs, or why there is none."""

    layout: StockLayout | None
    """The fastest that fits; if none does, the one that comes closest. None: no grid at all."""
    reason: str
    """Why nothing fits: memory or divisibility; empty where something does."""

    @property
    def fitting(self) -> StockLayout | None:
        """None where nothing fits."""
        return None if self.reason else self.layout


@dataclass(frozen=True, kw_only=True)
class StockAtBest:
    """Stock's two figures, on all GPUs or on those of them that it is fastest on."""

    even: Stock
    """What one gets without a layout written by hand."""
    best: Stock
    """The fastest of all layouts; never slower than `even`."""


class StockSearches:
    """Searches of layouts on sets of GPUs of one cluster, each of them once.

    `part_of`: None: the same inputs on fewer GPUs.
    """

    def __init__(self, inputs: Inputs, part_of: PartOf | None = None) -> None:
        self.inputs = inputs
        self.part_of = part_of or partial(on_ranks, inputs)
        self.everything = tuple(range(inputs.world_size))
        self.found: dict[tuple[int, ...], tuple[StockLayout, ...]] = {}
        """Ranks, ascending -> layouts on these GPUs that fit, fastest first."""
        self._closest: StockLayout | None = None

    def on(self, ranks: tuple[int, ...]) -> tuple[StockLayout, ...]:
        """Layouts on these GPUs that fit, fastest first."""
        if ranks not in self.found:
            part = self.inputs if ranks == self.everything else self.part_of(ranks)
            searches = _searches(part, 1.0 if ranks == self.everything else _SHARE_OF_FEWER)
            found = [layout for search in searches for layout in search.run()]
            found.sort(key=lambda each: each.iteration_s)
            self.found[ranks] = tuple(_renumbered(found, ranks))
            if ranks == self.everything:
                misfits = [each.closest for each in searches if each.closest is not None]
                self._closest = min(misfits, key=lambda each: each.fullest, default=None)
        return self.found[ranks]

    def on_all(self) -> StockAtBest:
        """Both figures with all GPUs in use."""
        even = stock_on_all(self.inputs)
        return StockAtBest(even=even, best=self._fastest(even, self.on(self.everything)))

    @gc_paused()
    def at_best(self) -> StockAtBest:
        """Both figures, of all sets that are promising or were searched for another's sake."""
        for ranks in self._promising:
            self.on(ranks)
        found = [layout for layouts in self.found.values() for layout in layouts[:1]]
        return StockAtBest(even=self._even, best=self._fastest(self._even, found))

    @cached_property
    def _even(self) -> Stock:
        return stock_in_short(self.inputs)

    @cached_property
    def _promising(self) -> tuple[tuple[int, ...], ...]:
        """All GPUs; and those smaller sets on which a layout may be faster."""
        best_s = min((each.iteration_s for each in self.on(self.everything)), default=math.inf)
        hopeful = []
        for ranks in subsets(self.inputs):
            part = self.part_of(ranks)
            # The bound is of ranks that read all experts of their layers.
            if lower_bound_s(part) < best_s or part.model.num_experts is not None:
                quick_s = min(each.quick_s() for each in _searches(part))
                if quick_s < min(_MAY_BE_CLOSER * best_s, math.inf):
                    hopeful.append((quick_s, ranks))
        is_many = self.inputs.world_size > _FEW_GPUS
        most = _MOST_SEARCHED_OF_MANY if is_many else _MOST_SEARCHED
        return (self.everything, *(ranks for _, ranks in sorted(hopeful)[:most]))

    def _fastest(self, even: Stock, found: Sequence[StockLayout]) -> Stock:
        """If nothing fits: the layout that comes closest."""
        others = [each for each in (self._closest, even.layout) if each is not None]
        return _best_of([*found, *others], lambda: even.reason)


def stock_at_best(inputs: Inputs) -> StockAtBest:
    """Search both."""
    return StockSearches(inputs).at_best()


def no_stock_layout(found: Stock) -> NoPlanError:
    """The error where no layout fits, with what the closest one lacks."""
    problem = Problem(
        where="strategy stock",
        found=f"no layout that fits ({found.reason})",
        expected="a layout of stock Megatron that fits, on all GPUs or some of them",
        remedy="The strategy zorse also gives GPUs different micro-batches, TP groups and "
        "offloading.",
    )
    error = NoPlanError("the strategy stock has no plan", [problem])
    if (layout := found.layout) is not None:
        lacking = {
            rank: peak - capacity
            for rank, (peak, capacity) in enumerate(
                zip(layout.peaks_bytes, layout.inputs.capacities_bytes, strict=True)
            )
            if peak > capacity
        }
        error.missing_bytes = sum(lacking.values())
        error.bytes_per_gpu = max(lacking.values(), default=0)
        error.gpu_kinds = tuple(dict.fromkeys(layout.inputs.kinds[rank] for rank in lacking))
    return error


def stock_on_all(inputs: Inputs, *, most_computations: int | None = None) -> Stock:
    """Stock in even layouts on all GPUs of the cluster.

    `most_computations`: forwards and backwards after which no further layout is simulated; None: so
    many that it takes a second or two.
    """
    most = _IN_SHORT if most_computations is None else most_computations
    return _best_of(_even(inputs, most), partial(no_grid, inputs))


def stock_in_short(inputs: Inputs) -> Stock:
    """The same on all GPUs or on those, not all, that it is fastest on: some kinds, a power of 2.

    On nine clusters of 4 to 64 GPUs what this finds was up to 4 % slower than the best layout.
    """
    found = _even(inputs, _IN_SHORT)
    return _best_of([*found, *_even_on_fewer(inputs)], partial(no_grid, inputs))


def _even_on_fewer(inputs: Inputs) -> Iterator[StockLayout]:
    """On the most promising sets of GPUs, by the closed form."""
    ranked: list[tuple[float, float, tuple[int, ...], Inputs]] = []
    for ranks in subsets(inputs):
        part = on_ranks(inputs, ranks)
        found = [each for some in (False, True) for each in _first(part, spreads_experts=some)]
        found.sort(key=lambda each: (max(1.0, each.fullest), each.iteration_s))
        if found:
            ranked.append((max(1.0, found[0].fullest), found[0].iteration_s, ranks, part))
    ranked.sort(key=lambda row: row[:3])
    hopeful = [row for row in ranked[:_MOST_SETS] if row[0] == ranked[0][0]]
    for *_, ranks, part in hopeful:
        yield from _renumbered(_even(part, _IN_SHORT // len(hopeful)), ranks)


def _first(inputs: Inputs, *, spreads_experts: bool) -> list[GridEstimate]:
    return grid_estimates(inputs, spreads_experts=spreads_experts)[:1]


def _searches(inputs: Inputs, share: float = 1.0) -> list[StockSearch]:
    """Of layouts, and of a model with experts of those with expert parallelism apart: they take
    nothing from the others' simulations."""
    found = [StockSearch(inputs, share)]
    if inputs.model.num_experts is not None:
        found.append(StockSearch(inputs, share, spreads_experts=True))
    return found


def _even(inputs: Inputs, most_computations: int) -> list[StockLayout]:
    """See `StockSearch.even`."""
    return [each for search in _searches(inputs) for each in search.even(most_computations)]


def _renumbered(layouts: Iterable[StockLayout], ranks: tuple[int, ...]) -> Iterator[StockLayout]:
    """`ranks`: of the search -> of the whole cluster."""
    for each in layouts:
        yield replace(each, ranks=tuple(ranks[rank] for rank in each.ranks))


def _best_of(layouts: Sequence[StockLayout], why_none: Callable[[], str]) -> Stock:
    """The fastest that fits; if none does, the one that comes closest."""
    if not layouts:
        return Stock(layout=None, reason=why_none())
    fitting = [each for each in layouts if each.fits]
    if fitting:
        return Stock(layout=min(fitting, key=lambda each: each.iteration_s), reason="")
    closest = min(layouts, key=lambda each: each.fullest)
    return Stock(layout=closest, reason=closest.reason)


# Baseline `stock`: the best layouts of stock Megatron, as plans.
#
# As a plan a layout is executed by this project's runtime and costed so; what stock Megatron itself
# takes says `stock_best`.


def stock_layouts(inputs: Inputs) -> tuple[StockLayout, ...]:
    """Stock's layouts on all GPUs that fit, fastest first; none are looked for on too many."""
    searches = StockSearches(inputs)
    return searches.on(searches.everything) if inputs.world_size <= MOST_GPUS else ()


def stock_plans(evaluator: Evaluator, layouts: Sequence[StockLayout]) -> list[Evaluation]:
    """Evaluations of layouts on all GPUs, in their order; this runtime may prefer another one.

    This runtime's transfers are under way while it computes, which takes memory for a few more
    activations: a layout that fills a GPU under unmodified Megatron may not fit. With expert
    parallelism ranks share experts.
    """
    plans = [_as_plan(evaluator.inputs, each) for each in layouts]
    return [each for plan in plans if (each := evaluator.evaluate_plan(plan)) is not None]


def _as_plan(inputs: Inputs, layout: StockLayout) -> Plan:
    degree = layout.grid.expert_parallel
    plan = layout.plan_on(inputs, is_written=degree == 1)
    if degree == 1:
        return plan
    held = (inputs.model.num_experts or 0) // degree
    return replace(
        plan,
        groups=tuple(
            replace(group, replicas=tuple(_sharing(group.replicas, degree, held)))
            for group in plan.groups
        ),
    )


def _sharing(replicas: Sequence[Replica], degree: int, held: int) -> Iterator[Replica]:
    """Each `degree` of them as one, whose ranks have so many experts."""
    for first in range(0, len(replicas), degree):
        yield sharing_experts(replicas[first : first + degree], (held,) * degree)


def stock_runs(evaluator: Evaluator, layouts: Sequence[StockLayout]) -> list[Evaluation]:
    """The same; but those with expert parallelism as unmodified Megatron runs them."""
    found = []
    for each in layouts:
        if each.grid.expert_parallel == 1:
            found += stock_plans(evaluator, [each])
        else:
            found.append(_run_by_stock(evaluator.inputs, each))
    return found


def _run_by_stock(inputs: Inputs, layout: StockLayout) -> Evaluation:
    result = simulate_plan(
        inputs,
        layout.plan_on(inputs, is_written=False),
        framework=framework_of(layout.grid),
    )
    return Evaluation(
        estimate=None,
        plan=layout.plan_on(inputs),
        result=result,
        iteration_s=result.iteration_s,
        peaks_bytes=result.peak_memory_bytes,
        overflow_bytes=(),
    )
