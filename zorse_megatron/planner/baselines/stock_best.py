"""Stock Megatron at its best: in any layout, and in even ones on all GPUs or the best of them.

One answer for everybody who compares with stock. The simulator runs stock's own 1F1B, whose
transfers stop the ranks (`STOCK_1F1B`), and its interleaved schedule, of whose transfers only the
sends of activations do (`STOCK_INTERLEAVED`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from zorse_megatron.errors import Problem
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.baselines.stock_costs import GridEstimate, grid_estimates
from zorse_megatron.planner.baselines.stock_layouts import Grid, no_grid, plan_of_grid, subsets
from zorse_megatron.planner.baselines.stock_search import Simulated, StockSearch, framework_of
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, computations, gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs, on_ranks
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.result import SimulationResult

MOST_GPUS = 256
"""Beyond, searching stock's layouts takes longer than searching for plans."""
_GIB = 2**30
# The closed form only computes; what layouts send decides what is simulated first.
_MAY_BE_FASTER = 1.5
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
_MOST_MISFITS = 3  # layouts that the closed form says do not fit, simulated to see which is closest


@dataclass(frozen=True, kw_only=True)
class StockLayout:
    """A layout on some GPUs, by the simulator."""

    inputs: Inputs
    """With these GPUs alone, in the order of stock's ranks."""
    ranks: tuple[int, ...]
    """Rank of stock's job -> rank of the whole cluster."""
    grid: Grid
    iteration_s: float
    peaks_bytes: tuple[int, ...]

    @property
    def fullest(self) -> float:
        """Highest peak of a rank over what its GPU may hold; it fits up to 1."""
        return max(self._filled)

    @property
    def plan(self) -> Plan:
        """The same layout as a plan, of ranks in stock's order."""
        return plan_of_grid(self.inputs, self.grid)

    @property
    def gpu_ranks(self) -> tuple[int, ...]:
        """Ranks of the whole cluster that it uses, ascending."""
        return tuple(sorted(self.ranks))

    def plan_on(self, inputs: Inputs) -> Plan:
        """The same as a plan for these GPUs in the cluster's order, which `inputs` have."""
        place = {rank: at for at, rank in enumerate(self.gpu_ranks)}
        return plan_of_grid(inputs, self.grid, [place[rank] for rank in self.ranks])

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of an iteration."""
        return self.inputs.global_batch_size * self.inputs.sequence_length / self.iteration_s

    @property
    def description(self) -> str:
        """For people: GPUs and layout."""
        return f"{self.gpus}: {self.grid.description}"

    @property
    def gpus(self) -> str:
        """For people: how many of which kind."""
        return ", ".join(f"{n} {kind}" for kind, n in Counter(self.inputs.kinds).items())

    @property
    def reason(self) -> str:
        """Why it does not fit; empty where it does."""
        if self.fullest <= 1:
            return ""
        rank = max(range(len(self._filled)), key=self._filled.__getitem__)
        needed, had = self.peaks_bytes[rank] / _GIB, self.inputs.capacities_bytes[rank] / _GIB
        return (
            f"memory: {self.grid.description} comes closest, and needs {needed:.1f} of {had:.1f} "
            f"GiB on rank {self.ranks[rank]} ({self.inputs.kinds[rank]})"
        )

    @property
    def _filled(self) -> list[float]:
        pairs = zip(self.peaks_bytes, self.inputs.capacities_bytes, strict=True)
        return [peak / capacity for peak, capacity in pairs]


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
            search = StockSearch(part, 1.0 if ranks == self.everything else _SHARE_OF_FEWER)
            self.found[ranks] = tuple(_layout(search, each, ranks) for each in search.run())
            closest = search.closest
            if ranks == self.everything and closest is not None:
                self._closest = _layout(search, closest, ranks)
        return self.found[ranks]

    def on_all(self) -> StockAtBest:
        """Both figures with all GPUs in use."""
        even = stock_on_all(self.inputs, most_computations=_IN_SHORT)
        return StockAtBest(even=even, best=self._fastest(even, self.on(self.everything)))

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
            if lower_bound_s(part) < best_s:
                quick_s = StockSearch(part).quick_s()
                if quick_s < min(_MAY_BE_CLOSER * best_s, math.inf):
                    hopeful.append((quick_s, ranks))
        is_many = self.inputs.world_size > _FEW_GPUS
        most = _MOST_SEARCHED_OF_MANY if is_many else _MOST_SEARCHED
        return (self.everything, *(ranks for _, ranks in sorted(hopeful)[:most]))

    def _fastest(self, even: Stock, found: Sequence[StockLayout]) -> Stock:
        """If nothing fits: the layout that comes closest."""
        fitting = [*found, *([even.fitting] if even.fitting else [])]
        if fitting:
            return Stock(layout=min(fitting, key=lambda each: each.iteration_s), reason="")
        near = [each for each in (self._closest, even.layout) if each is not None]
        if not near:
            return even
        closest = min(near, key=lambda each: each.fullest)
        return Stock(layout=closest, reason=closest.reason)


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


def stock_on_all(inputs: Inputs, *, most_computations: int = _IN_SHORT) -> Stock:
    """Stock in even layouts on all GPUs of the cluster.

    `most_computations`: forwards and backwards after which no further layout is simulated.
    """
    return _stock_on(inputs, tuple(range(inputs.world_size)), most_computations)


def stock_on_best(inputs: Inputs) -> Stock:
    """The same on those GPUs, not all, that it is fastest on: some kinds, a power of 2 of them."""
    ranked: list[tuple[float, float, tuple[int, ...], Inputs]] = []
    for ranks in subsets(inputs):
        part = on_ranks(inputs, ranks)
        found = grid_estimates(part)
        if found:
            ranked.append((max(1.0, found[0].fullest), found[0].iteration_s, ranks, part))
    if not ranked:
        return Stock(layout=None, reason="divisibility: fewer GPUs make no even layout either")
    ranked.sort(key=lambda row: row[:3])
    hopeful = [row for row in ranked[:_MOST_SETS] if row[0] == ranked[0][0]]
    budget = _IN_SHORT // len(hopeful)
    tried = [_stock_on(part, ranks, budget) for *_, ranks, part in hopeful]
    fitting = [each for each in tried if each.fitting is not None]
    return min(fitting, key=_iteration_s) if fitting else min(tried, key=_fullest)


def stock_in_short(inputs: Inputs) -> Stock:
    """The faster of both: a second or two.

    On nine clusters of 4 to 64 GPUs what this finds was up to 4 % slower than the best layout.
    """
    found = stock_on_all(inputs, most_computations=_IN_SHORT), stock_on_best(inputs)
    fitting = [each for each in found if each.fitting is not None]
    return min(fitting, key=_iteration_s) if fitting else min(found, key=_fullest)


def _layout(search: StockSearch, found: Simulated, ranks: tuple[int, ...]) -> StockLayout:
    """`ranks`: of the search -> of the whole cluster."""
    return StockLayout(
        inputs=search.view(found.site.placement).inputs,
        ranks=tuple(ranks[rank] for rank in found.site.placement.ranks),
        grid=found.site.grid,
        iteration_s=found.iteration_s,
        peaks_bytes=found.peaks_bytes,
    )


def _stock_on(part: Inputs, ranks: tuple[int, ...], budget: int) -> Stock:
    estimates = grid_estimates(part)
    if not estimates:
        return Stock(layout=None, reason=no_grid(part))
    layouts = list(_simulated(part, ranks, estimates, budget))
    fitting = [each for each in layouts if each.fullest <= 1]
    if fitting:
        best = min(fitting, key=lambda each: each.iteration_s)
        return Stock(layout=best, reason="")
    closest = min(layouts, key=lambda each: each.fullest)
    return Stock(layout=closest, reason=closest.reason)


def _simulated(
    inputs: Inputs, ranks: tuple[int, ...], estimates: list[GridEstimate], budget: int
) -> Iterator[StockLayout]:
    """Simulate what may be the fastest, best first; if nothing fits, what may come closest."""
    best_s, spent, misfits = float("inf"), 0, 0
    for estimate in estimates:
        hopeless = estimate.iteration_s > _MAY_BE_FASTER * best_s
        if best_s < float("inf") and (hopeless or estimate.fullest > 1):
            continue
        misfits += estimate.fullest > 1
        if spent > budget or misfits > _MOST_MISFITS:
            return
        plan = plan_of_grid(inputs, estimate.grid)
        spent += computations(plan)
        with gc_paused():
            result: SimulationResult = simulate_plan(
                inputs, plan, framework=framework_of(estimate.grid)
            )
        layout = StockLayout(
            inputs=inputs,
            ranks=ranks,
            grid=estimate.grid,
            iteration_s=result.iteration_s,
            peaks_bytes=result.peak_memory_bytes,
        )
        if layout.fullest <= 1:
            best_s = min(best_s, layout.iteration_s)
        yield layout


def _iteration_s(stock: Stock) -> float:
    assert stock.layout is not None
    return stock.layout.iteration_s


def _fullest(stock: Stock) -> float:
    return stock.layout.fullest if stock.layout is not None else float("inf")


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
    activations: a layout that fills a GPU under unmodified Megatron may not fit.
    """
    plans = [layout.plan_on(evaluator.inputs) for layout in layouts]
    return [each for plan in plans if (each := evaluator.evaluate_plan(plan)) is not None]
