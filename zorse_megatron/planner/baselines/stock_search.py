"""Searches stock's layouts: seeds in closed form, then better neighbours by simulation.

Seeds are costed on sets of GPUs, in orders, for all sizes of parallelism, virtual stages,
micro-batches and ways to recompute, with layers shared out so that the slowest stage is as fast as
can be. The best of them are simulated as stock runs them, on a part of the batch; from the fastest
on, one layer is moved at a time, nodes are exchanged, sizes and settings changed, until nothing is
faster. Which simulations there are depends on the inputs alone.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from zorse_megatron.costs.interface import RecomputeMode
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.baselines.stock_costs import (
    GridCosts,
    GridEstimate,
    grid_estimates,
    in_virtual_stages,
)
from zorse_megatron.planner.baselines.stock_layouts import (
    Grid,
    Placement,
    expert_degrees,
    in_order,
    in_rounds,
    may_run,
    placements,
    plan_of_grid,
    shapes,
    swapped,
    takes,
    tensor_degrees,
)
from zorse_megatron.planner.evaluate import computations, gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.simulate.assumptions import STOCK_1F1B, STOCK_INTERLEAVED, Framework
from zorse_megatron.simulate.result import SimulationResult

_GIB = 2**30
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_SEEDED = (1, 2, 4, 8, 16)
"""Sizes of micro-batches that seeds have."""
_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Layers of each virtual stage that are recomputed."""
_MOST_VIRTUAL = 8
_ROUNDS = 4
"""Rounds of micro-batches, one for each stage, that stand for a longer batch."""
_KEPT = 3
"""Seeds of each placement, tensor-parallel degree and number of stages."""
_FINALISTS = 5
_FEW_ORDERS = 2
_QUICK_SIZES, _QUICK_COUNTS, _QUICK_VIRTUAL = (1, 4), (2,), 1
"""Micro-batches, layers to recompute of each virtual stage, and virtual stages at most, that tell
whether a set of GPUs is worth a search."""
_PROMISING = 1.25
"""Settings that take longer than so many times the best ones are not tried in other orders."""
_COMPUTATIONS = ((16, 20_000), (256, 30_000))  # up to so many GPUs
"""Forwards and backwards that are simulated, those of equal ranks once."""
_BEYOND = 60_000
_AS_LONG_AS = 100
"""So many of them, a simulation takes beside them."""
_MAY_BE_FASTER = 1.5
"""Even layouts that the closed form says take so much longer than a simulated one are not either:
it only computes, and what layouts send decides what is simulated first."""
_MOST_MISFITS = 3
"""Even layouts that the closed form says do not fit, simulated to see which is closest."""
_CLOSE = 1.12
"""Neighbours that the closed form says take so much longer are not simulated."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A layout on GPUs of a search in an order."""

    placement: Placement
    grid: Grid


@dataclass(frozen=True, kw_only=True)
class StockLayout:
    """A layout on some GPUs, by the simulator."""

    inputs: Inputs
    """With these GPUs alone, in the order of stock's ranks."""
    ranks: tuple[int, ...]
    """Rank of stock's job -> rank of the whole cluster."""
    site: Site
    iteration_s: float
    peaks_bytes: tuple[int, ...]

    @property
    def grid(self) -> Grid:
        """The layout itself."""
        return self.site.grid

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.fullest <= 1

    @cached_property
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

    def plan_on(self, inputs: Inputs, *, is_written: bool = True) -> Plan:
        """The same for these GPUs in the cluster's order, which `inputs` have."""
        place = {rank: at for at, rank in enumerate(self.gpu_ranks)}
        order = [place[rank] for rank in self.ranks]
        return plan_of_grid(inputs, self.grid, order, is_written=is_written)

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
        if self.fits:
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
class _Seed:
    estimate: GridEstimate
    site: Site


_Hopeful = set[tuple[object, ...]]
"""Of `_settings`."""


def framework_of(grid: Grid) -> Framework:
    """How stock runs a layout."""
    framework = STOCK_1F1B if grid.virtual == 1 else STOCK_INTERLEAVED
    framework = replace(framework, expert_parallel=grid.expert_parallel)
    return framework if grid.distributed else replace(framework, state="replicated")


class View:
    """The inputs of one placement, and its costs by degrees of parallelism."""

    def __init__(self, base: Inputs, placement: Placement) -> None:
        self.placement = placement
        self.inputs = placement.inputs(base)
        self._costs: dict[tuple[int, int], GridCosts] = {}

    def costs(self, tensor: int, expert_parallel: int) -> GridCosts:
        """In closed form."""
        key = tensor, expert_parallel
        if key not in self._costs:
            self._costs[key] = GridCosts(self.inputs, *key)
        return self._costs[key]

    def costs_of(self, grid: Grid) -> GridCosts:
        """Of its degrees."""
        return self.costs(grid.tensor, grid.expert_parallel)


class StockSearch:
    """One search, on all GPUs of `base`, of layouts with expert parallelism, or of those without.
    `share`: of the simulations that there may be."""

    def __init__(self, base: Inputs, share: float = 1.0, *, spreads_experts: bool = False) -> None:
        self.base = base
        self.spreads_experts = spreads_experts
        most = next((most for gpus, most in _COMPUTATIONS if base.world_size <= gpus), _BEYOND)
        self.most = int(share * most)
        self.num_computations = 0
        self._views: dict[Placement, View] = {}
        self._short: dict[Site, StockLayout] = {}
        self._whole: dict[Site, StockLayout] = {}

    def run(self) -> list[StockLayout]:
        """Layouts that fit, with their whole batch, fastest first."""
        self.num_computations = 0
        self._climb(self._seeds())
        before, whole = self.num_computations, list[StockLayout]()
        for each in self._ranked()[:_FINALISTS]:
            if self.num_computations - before < self.most / 3 or not any(w.fits for w in whole):
                whole.append(self._simulated_whole(each.site))
        return sorted((each for each in whole if each.fits), key=lambda each: each.iteration_s)

    def even(self, most_computations: int) -> list[StockLayout]:
        """Even layouts in the cluster's order: those that may be the fastest, with their whole
        batch; if nothing fits, those that may come closest.

        `most_computations`: forwards and backwards after which no further one is simulated.
        """
        placement = in_order(self.base, tuple(range(self.base.world_size)))
        found, best_s, spent, misfits = list[StockLayout](), math.inf, 0, 0
        for estimate in grid_estimates(self.base, spreads_experts=self.spreads_experts):
            hopeless = estimate.iteration_s > _MAY_BE_FASTER * best_s
            if best_s < math.inf and (hopeless or estimate.fullest > 1):
                continue
            misfits += estimate.fullest > 1
            if spent > most_computations or misfits > _MOST_MISFITS:
                break
            layout = self._simulated_whole(Site(placement=placement, grid=estimate.grid))
            spent += computations(layout.plan)
            found.append(layout)
            if layout.fits:
                best_s = min(best_s, layout.iteration_s)
        return found

    @property
    def closest(self) -> StockLayout | None:
        """Of those that were simulated and do not fit the one that comes closest."""
        misfits = [each for each in self._short.values() if not each.fits]
        return min(misfits, key=lambda each: each.fullest, default=None)

    def proposed(self) -> tuple[Grid, ...]:
        """All that is costed in a few orders, and all that was simulated."""
        grids = [seed.site.grid for seed in self._in_few_orders()]
        return tuple(dict.fromkeys([*grids, *(site.grid for site in self._short)]))

    def view(self, placement: Placement) -> View:
        """Each placement's once."""
        if placement not in self._views:
            self._views[placement] = View(self.base, placement)
        return self._views[placement]

    # Seeds.

    def quick_s(self) -> float:
        """What the closed form says of the best layout of a few; infinite if none of them fits."""
        few = self._in_few_orders(is_quick=True)
        return min((seed.estimate.iteration_s for seed in few), default=math.inf)

    def _in_few_orders(self, *, is_quick: bool = False) -> list[_Seed]:
        """Everything that fits in the first orders."""
        few = self._placements[:_FEW_ORDERS]
        seeds = [seed for each in few for seed in self._seeds_of(each, None, is_quick=is_quick)]
        return [seed for seed in seeds if seed.estimate.fullest <= 1]

    def _seeds(self) -> list[_Seed]:
        """In all orders that are worth trying; in most of them what is promising in the first."""
        few = self._in_few_orders()
        limit_s = _PROMISING * min((e.estimate.iteration_s for e in few), default=math.inf)
        hopeful = {_settings(e.site.grid) for e in few if e.estimate.iteration_s < limit_s}
        seeds = []
        for placement in self._placements:
            by_shape: dict[tuple[bool, int, int, int], list[_Seed]] = {}
            for seed in self._seeds_of(placement, hopeful or None):
                grid, is_full = seed.site.grid, seed.estimate.fullest > 1
                shape = is_full, grid.tensor, grid.stages, grid.expert_parallel
                by_shape.setdefault(shape, []).append(seed)
            for some in by_shape.values():
                seeds += sorted(some, key=lambda seed: seed.estimate.iteration_s)[:_KEPT]
        return seeds + list(self._even(self._placements[0]))

    @cached_property
    def _placements(self) -> list[Placement]:
        return placements(self.base, tuple(range(self.base.world_size)))

    def _even(self, placement: Placement) -> Iterator[_Seed]:
        """The best even layouts."""
        fitting = [
            each
            for each in grid_estimates(self.base, spreads_experts=self.spreads_experts)
            if each.fullest <= 1 and self._may_be(each.grid)
        ]
        for estimate in fitting[:_KEPT]:
            yield _Seed(estimate=estimate, site=Site(placement=placement, grid=estimate.grid))

    def _may_be(self, grid: Grid) -> bool:
        """Whether it is in the space that is searched."""
        most = self.base.space.max_groups or grid.stages
        sizes = self._sizes(grid.width)
        is_known = grid.virtual in self._virtual(grid.stages)
        return grid.stages <= most and is_known and grid.micro_batch_size in sizes

    def _seeds_of(
        self, placement: Placement, hopeful: _Hopeful | None, *, is_quick: bool = False
    ) -> Iterator[_Seed]:
        """`hopeful`: settings that are tried; None: all, or a few if `is_quick`."""
        view = self.view(placement)
        for tensor in tensor_degrees(view.inputs):
            for stages, width, degree in self._shapes(tensor):
                costs = view.costs(tensor, degree)
                if stages > (self.base.space.max_groups or stages):
                    continue
                for size in self._sizes(width, _QUICK_SIZES if is_quick else _SEEDED):
                    for virtual in self._virtual(stages):
                        if is_quick and virtual > _QUICK_VIRTUAL:
                            break
                        if virtual > 1 and not in_rounds(self.base, stages, width, size):
                            break
                        plain = Grid(
                            layers=(1,) * (stages * virtual),
                            width=width,
                            micro_batch_size=size,
                            mode="none",
                            tensor=tensor,
                            virtual=virtual,
                            expert_parallel=degree,
                        )
                        counts = _QUICK_COUNTS if is_quick else _COUNTS
                        for grid in self._filled(costs, plain, hopeful, counts):
                            site = Site(placement=placement, grid=grid)
                            yield _Seed(estimate=costs.estimate(grid), site=site)

    def _filled(
        self, costs: GridCosts, plain: Grid, hopeful: _Hopeful | None, counts: tuple[int, ...]
    ) -> Iterator[Grid]:
        """With as much recomputed as may help."""
        for mode, recomputed in self._ways(len(plain.layers), counts):
            grid = replace(plain, mode=mode, recomputed=recomputed)
            if hopeful is not None and _settings(grid) not in hopeful:
                continue
            filled, has_room = costs.filled(grid)
            yield from filled
            if has_room:
                return  # more that is recomputed takes longer

    def _shapes(self, tensor: int) -> Iterator[tuple[int, int, int]]:
        """Yield stages, data-parallel width and ranks that share experts."""
        for stages, width in shapes(self.base, tensor):
            for degree in self._expert_degrees(width):
                yield stages, width, degree

    def _expert_degrees(self, width: int) -> list[int]:
        found = expert_degrees(self.base, width)
        return [each for each in found if (each > 1) == self.spreads_experts]

    def _virtual(self, stages: int) -> list[int]:
        """Numbers of virtual stages; a single stage has none."""
        schedules, found = self.base.space.schedules, []
        if "1f1b" in schedules or stages == 1:
            found.append(1)
        if "interleaved" in schedules and stages > 1:
            most = self.base.num_layers // stages
            small = {most, most // 2, most // 3}  # chunks of one, two or three layers
            found += [v for v in range(2, most + 1) if v <= _MOST_VIRTUAL or v in small]
        return found

    def _sizes(self, width: int, sizes: tuple[int, ...] = _SIZES) -> list[int]:
        sizes = self.base.space.sizes(sizes)
        most = self.base.space.max_micro_batch_size or self.base.space.sizes(_SIZES)[-1]
        return [size for size in sizes if size <= most and takes(self.base, width, size)]

    def _ways(
        self, virtual_stages: int, counts: tuple[int, ...] = _COUNTS
    ) -> Iterator[tuple[RecomputeMode, int | None]]:
        """What may be recomputed, least first."""
        modes = self.base.space.recompute
        if "none" in modes:
            yield "none", None
        if "selective" in modes:
            yield "selective", None
        if "full" in modes:
            most = 2 * self.base.num_layers // virtual_stages
            yield from (("full", count) for count in counts if count <= most)
            yield "full", None

    # Climbing.

    def _climb(self, seeds: list[_Seed]) -> None:
        """Simulate seeds while there is hope, then follow the fastest ones.

        Then the same with those that the closed form says do not fit, as it may be wrong.
        """
        tried: set[Site] = set()
        for full in (False, True):
            some = [seed for seed in seeds if (seed.estimate.fullest > 1) == full]
            before = self.num_computations
            for seed in _in_turn(some):
                if self.num_computations - before > self.most / 2 and self._best_s < math.inf:
                    break
                if seed.estimate.least_s < self._best_s:
                    self._try(seed.site)
            while self.num_computations < self.most and (here := self._next(tried)) is not None:
                tried.add(here.site)
                self._step_from(here)
            if self.num_computations >= self.most and self._best_s < math.inf:
                return

    def _next(self, tried: set[Site]) -> StockLayout | None:
        """The fastest that has not been followed yet, of the fastest few and of each shape's.

        Where nothing fits, the one that comes closest.
        """
        ranked = self._ranked()
        if not ranked:
            untried = [each for each in self._short.values() if each.site not in tried]
            return min(untried, key=lambda each: each.fullest, default=None)
        firsts = {_shape(each.site.grid): each for each in reversed(ranked)}
        few = [each for each in ranked[:_FINALISTS] if each.site not in tried]
        others = [each for each in firsts.values() if each.site not in tried]
        hopeful = [each for each in others if each.iteration_s < _CLOSE * self._best_s]
        return min((*few, *hopeful), key=lambda each: each.iteration_s, default=None)

    def _ranked(self) -> list[StockLayout]:
        fitting = [each for each in self._short.values() if each.fits]
        return sorted(fitting, key=lambda each: each.iteration_s)

    @property
    def _best_s(self) -> float:
        return min((e.iteration_s for e in self._short.values() if e.fits), default=math.inf)

    def _step_from(self, here: StockLayout) -> None:
        """Simulate neighbours, up to the first that is clearly faster, or clearly less full."""
        for site in self._neighbours(here):
            if self.num_computations >= self.most:
                return
            found = self._try(site)
            if here.fits and found.fits and found.iteration_s < 0.999 * here.iteration_s:
                return
            if not here.fits and found.fullest < 0.999 * here.fullest:
                return

    def _neighbours(self, here: StockLayout) -> list[Site]:
        """Those that may be faster, by the closed form."""
        grid, placement = here.site.grid, here.site.placement
        view = self.view(placement)
        sites = [Site(placement=placement, grid=each) for each in self._near(view, grid)]
        for other in swapped(placement, self.base):
            costs = self.view(other).costs_of
            if grid.tensor in tensor_degrees(self.view(other).inputs):
                found = dict.fromkeys([grid, *costs(grid).filled(grid)[0]])
                sites += [Site(placement=other, grid=each) for each in found]
        limit_s = _CLOSE * view.costs_of(grid).estimate(grid).iteration_s
        rows: list[tuple[float, float, int, Site]] = []
        for number, site in enumerate(sites):
            if site not in self._short:
                estimate = self.view(site.placement).costs_of(site.grid).estimate(site.grid)
                is_faster = estimate.iteration_s < limit_s and estimate.least_s < here.iteration_s
                if is_faster or not here.fits:
                    rows.append((max(1.0, estimate.fullest), estimate.iteration_s, number, site))
        return [site for *_, site in sorted(rows, key=lambda row: row[:3])]

    def _near(self, view: View, grid: Grid) -> list[Grid]:
        """Layouts that differ in one thing."""
        costs = view.costs_of(grid)
        near = [*_layers_moved(grid, costs.loads_s(grid))]
        changed = [
            *(replace(grid, micro_batch_size=size) for size in self._sizes(grid.width)),
            *(
                replace(grid, mode=mode, recomputed=count)
                for mode, count in self._ways(len(grid.layers))
            ),
        ]
        near += changed
        changed += [
            replace(grid, virtual=virtual, layers=(1,) * (grid.stages * virtual))
            for virtual in self._virtual(grid.stages)
        ]
        others = [each for each in self._expert_degrees(grid.width) if each != grid.expert_parallel]
        changed += [replace(grid, expert_parallel=each) for each in others]
        shared = [grid]
        shared += [each for one in changed for each in view.costs_of(one).filled(one)[0]]
        near += shared
        near += [each for one in shared if one.virtual > 1 for each in _either_way(one)]
        if grid.width > 1:
            near.append(replace(grid, distributed=not grid.distributed))
        return [each for each in dict.fromkeys(near) if may_run(view.inputs, each)]

    # Simulations.

    def _try(self, site: Site) -> StockLayout:
        if site not in self._short:
            self._short[site] = self._simulated(site, self._few(site))
        return self._short[site]

    def _few(self, site: Site) -> int:
        """Micro-batches that stand for all."""
        grid = site.grid
        count = self.base.global_batch_size // (grid.width * grid.micro_batch_size)
        return min(count, _ROUNDS * grid.stages)

    def _simulated_whole(self, site: Site) -> StockLayout:
        if site not in self._whole:
            grid = site.grid
            count = self.base.global_batch_size // (grid.width * grid.micro_batch_size)
            same = self._few(site) == count and site in self._short
            self._whole[site] = self._short[site] if same else self._simulated(site, count)
        return self._whole[site]

    def _simulated(self, site: Site, count: int) -> StockLayout:
        grid, inputs = site.grid, self.view(site.placement).inputs
        samples = grid.width * grid.micro_batch_size
        part = replace(inputs, global_batch_size=count * samples)
        plan = plan_of_grid(part, grid, is_written=False)
        with gc_paused():
            result = simulate_plan(part, plan, framework=framework_of(grid), merge_equal_ranks=True)
            peaks = result.peak_memory_bytes
        share = len(result.simulated_ranks) / len(result.stands_in)
        self.num_computations += _AS_LONG_AS + math.ceil(computations(plan) * share)
        more = inputs.global_batch_size // samples - count
        beat_s = _beat_s(result, grid, count) if more else 0.0
        return StockLayout(
            inputs=inputs,
            ranks=site.placement.ranks,
            site=site,
            iteration_s=result.iteration_s + more * beat_s,
            peaks_bytes=peaks,
        )


def _settings(grid: Grid) -> tuple[object, ...]:
    """All but the layers."""
    return (
        *(grid.tensor, grid.stages, grid.width, grid.expert_parallel),
        *(grid.virtual, grid.micro_batch_size),
        *(grid.mode, grid.recomputed),
    )


def _shape(grid: Grid) -> tuple[int, ...]:
    return grid.tensor, grid.stages, grid.width, grid.expert_parallel, min(grid.virtual, 2)


def _in_turn(seeds: Iterable[_Seed]) -> list[_Seed]:
    """The fastest of each shape, then the next of each, and so on."""
    turns: Counter[tuple[int, ...]] = Counter()
    rows: list[tuple[int, float, int, _Seed]] = []
    for seed in sorted(seeds, key=lambda each: each.estimate.iteration_s):
        shape = _shape(seed.site.grid)
        rows.append((turns[shape] // 2, seed.estimate.iteration_s, len(rows), seed))
        turns[shape] += 1
    return [seed for *_, seed in sorted(rows, key=lambda row: row[:3])]


def _either_way(grid: Grid) -> list[Grid]:
    """As many layers of each stage, the later or the earlier virtual stages having more."""
    counts = [grid.layers_of(at) for at in range(grid.stages)]
    return [
        replace(grid, layers=in_virtual_stages(counts, grid.virtual, more_first=first))
        for first in (False, True)
    ]


def _layers_moved(grid: Grid, loads_s: list[float]) -> Iterator[Grid]:
    """Yield layouts with one layer in another virtual stage, those of the slowest stages first."""
    slowest = sorted(range(grid.stages), key=lambda at: -loads_s[at])
    numbers = range(len(grid.layers))
    for stage in slowest:
        for source, target in itertools.product(numbers[stage :: grid.stages], numbers):
            if source != target and grid.layers[source] > 1:
                layers = list(grid.layers)
                layers[source] -= 1
                layers[target] += 1
                yield replace(grid, layers=tuple(layers))


def _beat_s(result: SimulationResult, grid: Grid, count: int) -> float:
    """What one more micro-batch adds: from one backward of the last virtual stage to the next.

    Measured over the last round of those, in which stages before have not begun to run dry.
    """
    timeline = result.timeline
    track = timeline.program.tracks[result.stands_in[-1]]
    last = len(grid.layers) - 1
    ends_s = [
        timeline.times.end_s[track.tasks[position]]
        for position, action in enumerate(track.actions)
        if action.kind is Kind.BACKWARD and action.chunk == last
    ]
    back = min(grid.stages, count - 1)
    return (ends_s[-1] - ends_s[-1 - back]) / back if back else ends_s[-1]
