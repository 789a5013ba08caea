"""Stock Megatron at its best: on all GPUs, and on the best subset of them.

One answer for everybody who compares with stock. The simulator runs stock's own 1F1B, whose
transfers stop the ranks (`STOCK_1F1B`), and its interleaved schedule, of whose transfers only the
sends of activations do (`STOCK_INTERLEAVED`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from zorse_megatron.planner.baselines.lower_bound import best_layers_per_s
from zorse_megatron.planner.baselines.stock_grids import (
    Grid,
    GridEstimate,
    grid_estimates,
    no_grid,
    plan_of_grid,
)
from zorse_megatron.planner.evaluate.evaluator import computations
from zorse_megatron.planner.evaluate.gc_paused import gc_paused
from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
from zorse_megatron.planner.inputs.other_gpus import on_ranks
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.framework import STOCK_1F1B, STOCK_INTERLEAVED, Framework
from zorse_megatron.simulate.result import SimulationResult

_GIB = 2**30
# The closed form only computes; what layouts send decides what is simulated first.
_MAY_BE_FASTER = 1.5
# Forwards and backwards that may be simulated, on all GPUs and on all smaller sets together, and
# the number of those.
_MOST_COMPUTATIONS = 60_000
_IN_SHORT = 3_000
_MOST_SETS = 3
_MOST_MISFITS = 3  # layouts that the closed form says do not fit, simulated to see which is closest
_MOST_KINDS = 5  # beyond, only the fastest ones together


@dataclass(frozen=True, kw_only=True)
class StockLayout:
    """An even layout on some GPUs, by the simulator."""

    inputs: Inputs
    """With these GPUs alone."""
    ranks: tuple[int, ...]
    """In the whole cluster."""
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
            best = min(found, key=_promise)
            ranked.append((*_promise(best), ranks, part))
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


def subsets(inputs: Inputs) -> Iterator[tuple[int, ...]]:
    """Yield GPUs of some kinds, all of them and a power of two; the fastest kinds first."""
    kinds = dict.fromkeys(inputs.kinds)
    fastest = sorted(kinds, key=lambda kind: -best_layers_per_s(inputs, kind))
    chosen = [
        some
        for count in range(1, len(fastest) + 1)
        for some in combinations(fastest, count)
        if len(fastest) <= _MOST_KINDS or some == tuple(fastest[:count])
    ]
    seen = {tuple(range(inputs.world_size))}
    for some in chosen:
        ranks = tuple(rank for rank, kind in enumerate(inputs.kinds) if kind in some)
        for number in (len(ranks), 2 ** (len(ranks).bit_length() - 1)):
            if ranks[:number] not in seen:
                seen.add(ranks[:number])
                yield ranks[:number]


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
    for estimate in sorted(estimates, key=_promise):
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


def framework_of(grid: Grid) -> Framework:
    """How stock runs a layout."""
    return STOCK_1F1B if grid.virtual == 1 else STOCK_INTERLEAVED


def _promise(estimate: GridEstimate) -> tuple[float, float]:
    """Smaller is better: those that fit first, then by what they compute and send."""
    return max(1.0, estimate.fullest), estimate.iteration_s + estimate.sending_s


def _iteration_s(stock: Stock) -> float:
    assert stock.layout is not None
    return stock.layout.iteration_s


def _fullest(stock: Stock) -> float:
    return stock.layout.fullest if stock.layout is not None else float("inf")
