"""Stock Megatron at its best: in any layout, and in even ones on all GPUs and on the best of them.

One answer for everybody who compares with stock. The simulator runs stock's own 1F1B, whose
transfers stop the ranks (`STOCK_1F1B`), and its interleaved schedule, of whose transfers only the
sends of activations do (`STOCK_INTERLEAVED`).
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zorse_megatron.planner.baselines.lower_bound import lower_bound_s
from zorse_megatron.planner.baselines.stock_costs import GridEstimate, grid_estimates
from zorse_megatron.planner.baselines.stock_grids import Grid, no_grid, plan_of_grid
from zorse_megatron.planner.baselines.stock_placements import subsets
from zorse_megatron.planner.baselines.stock_search import StockSearch, framework_of
from zorse_megatron.planner.evaluate.evaluator import computations
from zorse_megatron.planner.evaluate.gc_paused import gc_paused
from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
from zorse_megatron.planner.inputs.other_gpus import on_ranks
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.result import SimulationResult

_GIB = 2**30
# The closed form only computes; what layouts send decides what is simulated first.
_MAY_BE_FASTER = 1.5
# Forwards and backwards that may be simulated, on all GPUs and on all smaller sets together, and
# the number of those.
_MOST_COMPUTATIONS = 60_000
_IN_SHORT = 3_000
_MOST_SETS = 3
_MOST_SEARCHED = 2  # sets of GPUs, besides all of them, on which uneven layouts are searched
_MAY_BE_CLOSER = 1.03  # the closed form is mostly too short
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
        """The same layout as a plan."""
        return plan_of_grid(self.inputs, self.grid)

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


def stock_at_best(inputs: Inputs) -> StockAtBest:
    """Search both."""
    even = stock_in_short(inputs)
    best = best_stock(inputs)
    faster = [each for each in (best, even) if each.fitting is not None]
    return StockAtBest(even=even, best=min(faster, key=_iteration_s) if faster else best)


def stock_on_all(inputs: Inputs, *, most_computations: int = _MOST_COMPUTATIONS) -> Stock:
    """Stock on all GPUs of the cluster.

    `most_computations`: forwards and backwards after which no further layout is simulated.
    """
    return _stock_on(inputs, tuple(range(inputs.world_size)), most_computations)


def stock_on_best(inputs: Inputs, *, most_computations: int = _MOST_COMPUTATIONS) -> Stock:
    """Stock on those GPUs, not all, that it is fastest on: some kinds, a power of two of them."""
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
    budget = most_computations // len(hopeful)
    tried = [_stock_on(part, ranks, budget) for *_, ranks, part in hopeful]
    fitting = [each for each in tried if each.fitting is not None]
    return min(fitting, key=_iteration_s) if fitting else min(tried, key=_fullest)


def stock_in_short(inputs: Inputs) -> Stock:
    """The faster of both, after a twentieth of the simulations: a second or two.

    On nine clusters of 4 to 64 GPUs what this finds was up to 4 % slower than the best layout.
    """
    found = (
        stock_on_all(inputs, most_computations=_IN_SHORT),
        stock_on_best(inputs, most_computations=_IN_SHORT),
    )
    fitting = [each for each in found if each.fitting is not None]
    return min(fitting, key=_iteration_s) if fitting else min(found, key=_fullest)


def best_stock(inputs: Inputs) -> Stock:
    """Stock in the best layout of all: uneven ones too, in any order, on any GPUs."""
    everything = tuple(range(inputs.world_size))
    found = searched_layouts(inputs)[:1]
    best_s = found[0].iteration_s if found else math.inf
    hopeful = []
    for ranks in subsets(inputs):
        part = on_ranks(inputs, ranks)
        if lower_bound_s(part) < best_s:
            quick_s = StockSearch(part).quick_s()
            if quick_s < min(_MAY_BE_CLOSER * best_s, math.inf):
                hopeful.append((quick_s, ranks, part))
    for _, ranks, part in sorted(hopeful, key=lambda row: row[:2])[:_MOST_SEARCHED]:
        found += [
            replace(layout, ranks=tuple(ranks[rank] for rank in layout.ranks))
            for layout in searched_layouts(part)[:1]
        ]
    if found:
        return Stock(layout=min(found, key=lambda each: each.iteration_s), reason="")
    # Of even ones it is known which comes closest.
    return _stock_on(inputs, everything, _MOST_COMPUTATIONS)


def searched_layouts(inputs: Inputs) -> list[StockLayout]:
    """Layouts on all GPUs that fit, fastest first; of which there may be none."""
    search = StockSearch(inputs)
    return [
        StockLayout(
            inputs=search.view(each.site.placement).inputs,
            ranks=each.site.placement.ranks,
            grid=each.site.grid,
            iteration_s=each.iteration_s,
            peaks_bytes=each.peaks_bytes,
        )
        for each in search.run()
    ]


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
