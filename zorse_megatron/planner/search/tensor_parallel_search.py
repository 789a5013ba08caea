"""Searches plans with tensor-parallel groups: which GPUs are joined, then the usual search.

A TP group computes a layer sooner than one of its GPUs and holds more, but as a whole it never
computes more than they do alone: sums over the TP group come on top. What it can spare is waiting
(fewer, faster steps fill a pipeline sooner), recomputation and copies. So TP groups can pay only
where the plan without them leaves time, and only those whose sums cost less than that. These are
estimated in closed form, and the best of them get a whole search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from zorse_megatron.planner.closed_form.candidate import best_sizes
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts, SegmentTails
from zorse_megatron.planner.evaluate import Evaluation, best_first
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.inputs.tensor_parallel_members import TpLayout, with_tp_groups
from zorse_megatron.planner.outcome import OnProgress, SearchProgress, SearchStats
from zorse_megatron.planner.search.device_orders import (
    FINE,
    DeviceOrder,
    best_partitions,
    device_orders,
)
from zorse_megatron.planner.search.effort import EVERY_PARTITION_UP_TO, Effort
from zorse_megatron.planner.search.sources import batched
from zorse_megatron.planner.search.tensor_parallel_choices import requested, together, tp_layouts_of
from zorse_megatron.planner.search.workers import SearchWorker, Workers, workers_for
from zorse_megatron.planner.search.zorse_search import SearchResult, search_with

_SIZES = (1, 2, 4, 8)  # of micro-batches, at the best of which members are compared
_NEAR = 1.005  # what a light search finds may be so much slower than the best plan
_HOPELESS = 1.01  # the same of estimates
_BETTER = 0.998  # plans with TP groups are taken where they are faster by that much
_SEARCHED, _SEARCHED_OF_MANY = 2, 1  # whole searches with TP groups; of more than so many members
_MANY_UNITS = 16
_LIGHT_BEYOND = 64  # members; of more the light search is enough where it finds a better plan
_ESTIMATED = 16
_PART_OF_LOSS = 0.6
_ROUNDS = 2  # of joining more GPUs to the best so far
_SEARCHED_WHERE_NOTHING_FITS = 4


def search_with_tp(inputs: Inputs, on_progress: OnProgress) -> SearchResult:
    """Search for the fastest plan, with TP groups where they pay or where nothing fits without."""
    effort = Effort.of(inputs)
    with workers_for(inputs, effort, on_progress) as workers:
        alone = search_with(workers, effort, on_progress)
        asked = requested(inputs)
        tp_layouts = tp_layouts_of(inputs)
        if not tp_layouts and not asked:
            return alone
        tp_groups = _TpSearch(inputs, alone, workers, on_progress)
        for tp_layout in asked:
            tp_groups.search(tp_layout, asked=True)
        if alone.evaluations:
            tp_groups.improve(tp_layouts)
        if not tp_groups.fits:
            tp_groups.find(tp_layouts)
        return tp_groups.result


@dataclass
class _TpSearch:
    """What was found so far."""

    inputs: Inputs
    alone: SearchResult
    workers: Workers
    """Of the search without TP groups."""
    report: OnProgress
    found: list[Evaluation] = field(default_factory=list)
    considered: SearchStats = field(default_factory=SearchStats)
    seen: set[TpLayout] = field(default_factory=set)

    @property
    def fits(self) -> bool:
        """Whether any plan does."""
        return bool(self.alone.evaluations or self.found)

    @property
    def result(self) -> SearchResult:
        """Both searches; of plans that are equally fast those without TP groups."""
        alone = self.alone.evaluations
        least_s = alone[0].iteration_s if alone else math.inf
        faster = [each for each in self.found if each.iteration_s < _BETTER * least_s]
        slower = [each for each in self.found if each.iteration_s >= _BETTER * least_s]
        rows = [*best_first(faster), *best_first([*alone, *slower])] if faster else None
        return SearchResult(
            evaluations=rows or [*alone, *best_first(slower)],
            considered=self.alone.considered + self.considered,
        )

    @property
    def _best(self) -> Evaluation:
        return min([*self.alone.evaluations[:1], *self.found], key=lambda each: each.iteration_s)

    def search(self, tp_layout: TpLayout, *, asked: bool = False) -> None:
        """Search with these TP groups, once: with all effort where a part of it comes near the
        best.

        `asked`: plans are wanted in any case.
        """
        if tp_layout in self.seen:
            return
        self.seen.add(tp_layout)
        many = self.inputs.world_size > _LIGHT_BEYOND and self.inputs.space.effort != "high"
        inputs = with_tp_groups(self.inputs, tp_layout)
        effort = Effort.of(inputs)
        efforts = (effort.light, effort) if self.fits else (effort,)
        with workers_for(inputs, efforts[0], self.report) as workers:
            for some in efforts:
                least_s = self._best.iteration_s if self.fits else math.inf
                hopeless_s = math.inf if asked else self._hopeless_s
                result = search_with(
                    workers, some, self.report, hopeless_s=hopeless_s, least_s=least_s
                )
                self.considered += result.considered
                self.found += result.evaluations
                found_s = min((each.iteration_s for each in result.evaluations), default=math.inf)
                is_enough = many and not asked and found_s < _BETTER * least_s
                if found_s > _NEAR * least_s or is_enough:
                    return

    @property
    def _hopeless_s(self) -> float:
        """In closed form: candidates with TP groups from there on are not simulated.

        Compared with the estimate of the best plan without TP groups, as what closed forms leave
        out is much the same in both.
        """
        alone = self.alone.evaluations[:1]
        return min(
            (_HOPELESS * each.estimate.iteration_s for each in alone if each.estimate),
            default=math.inf,
        )

    def improve(self, tp_layouts: Sequence[TpLayout]) -> None:
        """Search with the TP groups that the closed form finds faster than single GPUs."""
        hopeful = self._may_pay(tp_layouts)
        if not hopeful:
            return
        many = self.inputs.world_size > _MANY_UNITS
        quick = QuickEstimate.beside(self.inputs, self.alone.evaluations[0])
        values: dict[TpLayout, float] = {}

        def estimate(some: Sequence[TpLayout]) -> None:
            new = [each for each in dict.fromkeys(some) if each not in values]
            for number, each in enumerate(batched(new, self.workers.number)):
                done = number * self.workers.number
                self.report(SearchProgress(phase="tp_layout", done=done, total=len(new)))
                tasks = [
                    partial(quick_s, first_to_last=quick.first_to_last, tp_layout=tp_layout)
                    for tp_layout in each
                ]
                for tp_layout, found in zip(each, self.workers.do(tasks), strict=True):
                    values[tp_layout] = found

        estimate([(), *hopeful[:_ESTIMATED]])
        # The quick search misses some of what a whole one finds, with TP groups and without.
        limit_s = (values.pop(()) + self._best.iteration_s) / 2

        def good_ones() -> list[TpLayout]:
            good = [each for each in values if values[each] < limit_s]
            return sorted(good, key=lambda each: (values[each], hopeful_order(each)))

        for _ in range(_ROUNDS if many else 0):
            good = good_ones()
            more = (together(self.inputs, good[0], each) for each in good[1:4]) if good else ()
            estimate([each for each in more if each is not None])
        for tp_layout in good_ones()[: _SEARCHED_OF_MANY if many else _SEARCHED]:
            self.search(tp_layout)

    def find(self, tp_layouts: Sequence[TpLayout]) -> None:
        """Search where nothing fits on single GPUs, with the TP groups that look best in closed
        form."""
        quick = QuickEstimate(inputs=self.inputs)
        # Some of all sizes: where memory is short, how many GPUs share a layer matters most.
        by_size = sorted(tp_layouts, key=hopeful_order)
        some = by_size[:: max(1, -(-len(by_size) // _ESTIMATED))]
        some = list(dict.fromkeys([*some, *by_size[-1:]]))
        values = {each: quick.iteration_s(with_tp_groups(self.inputs, each)) for each in some}
        ranked = sorted(some, key=lambda each: (values[each], hopeful_order(each)))
        for number, tp_layout in enumerate(ranked):
            if number >= _SEARCHED_WHERE_NOTHING_FITS or (number and values[tp_layout] == math.inf):
                return
            self.search(tp_layout)

    def _may_pay(self, tp_layouts: Sequence[TpLayout]) -> list[TpLayout]:
        """Those that might be faster if nothing ever waited, the fastest of them first.

        Sums that cost most of what the best plan loses leave too little to win.
        """
        best_s, alone_s = self._best.iteration_s, ideal_iteration_s(self.inputs)
        limit_s = alone_s + _PART_OF_LOSS * (_BETTER * best_s - alone_s)
        rows = []
        for order, tp_layout in enumerate(tp_layouts):
            ideal_s = ideal_iteration_s(with_tp_groups(self.inputs, tp_layout))
            if ideal_s < limit_s:
                rows.append((ideal_s, order, tp_layout))
        return [tp_layout for _, _, tp_layout in sorted(rows, key=lambda row: row[:2])]


def hopeful_order(tp_layout: TpLayout) -> tuple[int, int, tuple[int, ...]]:
    """Smaller TP groups first, and fewer of them."""
    degrees = [len(each.ranks) for each in tp_layout]
    return max(degrees), len(degrees), tp_layout[0].ranks


def ideal_iteration_s(inputs: Inputs) -> float:
    """All layers on all members, which never wait and never recompute."""
    rate = 0.0
    compute = inputs.compute
    sizes = [size for size in _SIZES if size <= inputs.global_batch_size]
    rates: dict[str, float] = {}
    for kind in inputs.kinds:
        if kind not in rates:
            times = [(size, compute.layer(kind, size)) for size in sizes]
            rates[kind] = max(size / each.both_s for size, each in times)
        rate += rates[kind]
    return inputs.global_batch_size * inputs.num_layers / rate


# A quick estimate of the best iteration among some members, to compare ways to join GPUs.


_LEVELS = (1, 2)
"""Micro-batch sizes, in blocks."""
_LIGHT = Effort(
    listed=30,
    costed=4,
    widened=2,
    finalists=1,
    computations=0,
    polished=1,
    orders=2,
    levels=(1, 2, 4),
    assignments=1,
)


@dataclass(frozen=True, kw_only=True)
class QuickEstimate:
    """The same simple search for all of them."""

    inputs: Inputs
    first_to_last: tuple[str, ...] = ()
    """Kinds of GPU in the order in which the best plan so far has them; (): any order."""

    @classmethod
    def beside(cls, inputs: Inputs, best: Evaluation) -> "QuickEstimate":
        """In the order of a plan's groups."""
        at = [
            inputs.kinds[rank]
            for chunk in best.plan.chunks
            for rank in best.plan.groups[chunk.group].ranks
        ]
        return cls(inputs=inputs, first_to_last=tuple(dict.fromkeys(at)))

    def iteration_s(self, inputs: Inputs) -> float:
        """Infinite where nothing fits. `inputs`: of the GPUs, or of members of them."""
        if inputs.world_size > EVERY_PARTITION_UP_TO:
            return self._by_partition(inputs)
        worker = SearchWorker(inputs, _LIGHT, lambda progress: None)
        found = worker.cost(("groupings",))
        return min((each.iteration_s for each in found), default=math.inf)

    def _by_partition(self, inputs: Inputs) -> float:
        """The best contiguous partition of one device order."""
        estimator = Estimator(inputs)
        most = min(inputs.space.max_groups or inputs.num_layers, inputs.num_layers)
        best_s = math.inf
        order = self._order(inputs)
        tails = SegmentTails(estimator, order)
        for level in inputs.space.sizes(_LEVELS):
            sizes = best_sizes(inputs, level)
            costs = SegmentCosts(estimator, tails, sizes=sizes, nested=False)
            found = best_partitions(costs, most_groups=most)
            best_s = min([best_s, *(each.value_s for each in found[:1])])
        return best_s

    def _order(self, inputs: Inputs) -> DeviceOrder:
        orders = device_orders(inputs, most_units=FINE, halved=False)
        return min(orders, key=lambda order: self._distance(inputs, order))

    def _distance(self, inputs: Inputs, order: DeviceOrder) -> list[int]:
        """Where the kinds of the plan come in an order, to compare: least is most alike."""
        kinds = dict.fromkeys(self._gpu_kind(inputs, member[0]) for member in order)
        return [
            self.first_to_last.index(kind) if kind in self.first_to_last else len(kinds)
            for kind in kinds
        ]

    @staticmethod
    def _gpu_kind(inputs: Inputs, member: int) -> str:
        members = inputs.members
        return members.base.kinds[members.tp_groups[member].ranks[0]]


def quick_s(worker: SearchWorker, *, first_to_last: tuple[str, ...], tp_layout: TpLayout) -> float:
    """An estimate, by a worker that has the inputs of single GPUs; no TP group: of the GPUs."""
    quick = QuickEstimate(inputs=worker.inputs, first_to_last=first_to_last)
    return quick.iteration_s(
        with_tp_groups(worker.inputs, tp_layout) if tp_layout else worker.inputs
    )
