"""Looks for GPUs of a cluster that train faster than all of them.

A GPU that is reached over a slow link, or is slow itself, may cost a pipeline more than it brings:
FlashFlex and Sailor leave such GPUs out, too. The plan for all GPUs comes first. From there the
search goes to smaller selections, without those that cannot be faster by a lower bound of the
iteration: the others are searched in short, or estimated where GPUs are many, and the most
promising in full. From one that is faster it goes on to smaller ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby

import networkx as nx

from zorse_megatron.planner.baselines.lower_bounds import link_bound
from zorse_megatron.planner.evaluate import gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import OnProgress, SearchProgress
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.tensor_parallel_search import QuickEstimate
from zorse_megatron.planner.search.zorse_search import search

# Selections of GPUs that differ from another one by what they leave out.


Selection = tuple[int, ...]
"""Ranks of the whole cluster, ascending."""
_EVERY_SUBSET_UP_TO = 4  # classes of alike nodes


@dataclass(frozen=True, kw_only=True)
class Fewer:
    """A smaller selection."""

    ranks: Selection
    of_nodes: bool
    """Whether its nodes have all the GPUs that they had; else one has fewer."""
    slow_links: bool
    """Whether what is left out is, or leaves, a region or nodes with slower adapters."""


def fewer(inputs: Inputs, selection: Selection) -> Iterator[Fewer]:
    """Yield selections with a region, a kind, some nodes or some of a node's GPUs less.

    Of alike nodes the last go first, and of a node its last GPUs, so that local ranks stay what
    they are. Each selection once, those of whole nodes first; none is empty, or in regions that no
    links join without those that are left out.
    """
    nodes = [tuple(ranks) for _, ranks in groupby(selection, key=inputs.spec.node_of)]
    alike = _alike(inputs, nodes)
    seen: set[Selection] = {selection, ()}
    for of_nodes, slow_links, ways in (
        (True, True, _far_nodes(inputs, nodes)),
        (True, False, _whole_nodes(inputs, nodes, alike)),
        (False, False, _parts_of_nodes(inputs, alike)),
    ):
        for without in ways:
            left = tuple(rank for rank in selection if rank not in without)
            if left not in seen:
                seen.add(left)
                if _is_joined(inputs, left):
                    yield Fewer(ranks=left, of_nodes=of_nodes, slow_links=slow_links)


def _far_nodes(inputs: Inputs, nodes: Sequence[Selection]) -> Iterator[frozenset[int]]:
    """What to leave out: a region, or all but it; a kind, where nodes are mixed and have it last;
    the nodes with the slowest adapters."""
    by_region: dict[str, list[Selection]] = {}
    by_rate: dict[float, list[Selection]] = {}
    for ranks in nodes:
        node = inputs.spec.node_with(ranks[0])
        by_region.setdefault(node.region, []).append(ranks)
        by_rate.setdefault(node.nics_bytes_per_s, []).append(ranks)
    for each in by_region.values():
        yield _ranks(each)
        yield _ranks(nodes) - _ranks(each)
    for kind in dict.fromkeys(inputs.kinds[ranks[-1]] for ranks in nodes):
        tails = [_tail(inputs, ranks, kind) for ranks in nodes]
        of_kind = sum(inputs.kinds[rank] == kind for ranks in nodes for rank in ranks)
        is_mixed = any(0 < len(tail) < len(ranks) for tail, ranks in zip(tails, nodes, strict=True))
        if is_mixed and sum(map(len, tails)) == of_kind:
            yield _ranks(tails)
    if len(by_rate) > 1:
        yield _ranks(by_rate[min(by_rate)])


def _tail(inputs: Inputs, ranks: Selection, kind: str) -> Selection:
    """The last GPUs of a node, as far as they are of the kind."""
    count = next(
        (at for at, rank in enumerate(reversed(ranks)) if inputs.kinds[rank] != kind), len(ranks)
    )
    return ranks[len(ranks) - count :]


def _whole_nodes(
    inputs: Inputs, nodes: Sequence[Selection], alike: Sequence[Sequence[Selection]]
) -> Iterator[frozenset[int]]:
    """What to leave out: a kind, or all but it; classes of nodes, or some of a class."""
    some: dict[str, list[Selection]] = {}
    for ranks in nodes:
        if len(kinds := {inputs.kinds[rank] for rank in ranks}) == 1:
            some.setdefault(kinds.pop(), []).append(ranks)
    for each in some.values():
        yield _ranks(each)
        yield _ranks(nodes) - _ranks(each)
    for count in range(1, len(alike) if len(alike) <= _EVERY_SUBSET_UP_TO else 2):
        for classes in combinations(alike, count):
            yield _ranks(node for each in classes for node in each)
    for same in alike:
        every = range(1, len(same))
        for count in every if len(same) <= _EVERY_SUBSET_UP_TO else (1, len(same) // 2):
            yield _ranks(same[-count:])


def _parts_of_nodes(
    inputs: Inputs, alike: Sequence[Sequence[Selection]]
) -> Iterator[frozenset[int]]:
    """The last GPU of a node, half of them, or those of the kind that comes last."""
    for same in alike:
        last = same[-1]
        of_kind = len(_tail(inputs, last, inputs.kinds[last[-1]]))
        for count in dict.fromkeys((of_kind, len(last) // 2, 1)):
            if 0 < count < len(last):
                yield frozenset(last[-count:])


def _is_joined(inputs: Inputs, selection: Selection) -> bool:
    regions = {inputs.spec.node_with(rank).region for rank in selection}
    graph = nx.Graph(
        link.regions for link in inputs.spec.region_links if regions.issuperset(link.regions)
    )
    graph.add_nodes_from(regions)
    return bool(nx.is_connected(graph))


def _alike(inputs: Inputs, nodes: Sequence[Selection]) -> list[list[Selection]]:
    """Nodes with the same selected GPUs and the same links, in order."""
    classes: dict[object, list[Selection]] = {}
    for ranks in nodes:
        node = inputs.spec.node_with(ranks[0])
        key = (
            tuple(inputs.kinds[rank] for rank in ranks),
            *(node.link, node.nics, node.host_link_bytes_per_s, node.host_memory_bytes),
            *(node.region, node.switch),
        )
        classes.setdefault(key, []).append(ranks)
    return list(classes.values())


def _ranks(parts: Iterable[Selection]) -> frozenset[int]:
    return frozenset(rank for part in parts for rank in part)


Report = OnProgress
PartOf = Callable[[Selection], Inputs]
"""The inputs on some GPUs alone."""
Search = Callable[[Selection], float]
"""Iteration of the best plan for some GPUs, by a whole search; infinite where nothing fits."""

WORTH_IT = 0.998
"""Fewer GPUs are used where an iteration takes less than this part of that with all of them."""
_FEW_GPUS = 32
_VERY_FEW_GPUS = 6
# Selections that are searched in short or estimated, in each step: a short search of 8 GPUs takes a
# tenth of a whole one.
_COMPARED, _COMPARED_OF_VERY_FEW = 4, 8
_SEARCHED, _SEARCHED_OF_MANY = 3, 1  # those of them that are searched in full
_STEPS = 4
# What is expected of a whole search, over the best so far, that it is worth it. A short search has
# missed up to 15 %, so what it misses of the larger selection is taken off; whole nodes are what
# clusters grow by. On many GPUs one estimate stands for a search: large gains only.
_WORTH_A_SEARCH = {"nodes of very few": 1.1, "nodes": 1.03, "parts": 1.0, "many": 0.97}
# Some GPUs of a node less save little where all of them have the same fast links; and no plan was
# seen so near the bound.
_BEST_EFFICIENCY = 0.95


@dataclass(frozen=True, kw_only=True)
class Point:
    """A selection, and the best plan that was found for it."""

    ranks: Selection
    iteration_s: float
    """Infinite where nothing fits."""
    tokens: int
    """Of an iteration."""

    @property
    def tokens_per_s(self) -> float:
        """Zero where nothing fits."""
        return self.tokens / self.iteration_s

    @property
    def fits(self) -> bool:
        """Whether any plan does."""
        return self.iteration_s < math.inf


def explore(
    inputs: Inputs,
    search_on: Search,
    *,
    part_of: PartOf,
    short: Search | None = None,
    stock_s: Mapping[Selection, float] | None = None,
    on_progress: Report | None = None,
) -> tuple[Point, ...]:
    """Return the selections that were searched in full, best first; all GPUs are one of them.

    The best is that of all GPUs unless fewer are faster by 0.2 %. `short`: a search that takes
    less; None: the usual one's (`short_search`). `stock_s`: what stock Megatron takes on some
    selections, on which a whole search finds no slower plan: the best is no slower than any.
    """
    return _Exploration(
        inputs=inputs,
        search_on=search_on,
        part_of=part_of,
        short=short or short_search(part_of),
        stock_s=stock_s or {},
        report=on_progress or (lambda progress: None),
    ).run()


def short_search(part_of: PartOf) -> Search:
    """Return a search with a small part of the usual effort, without tensor-parallel groups."""

    def search_on(ranks: Selection) -> float:
        part = part_of(ranks)
        found = search(part, lambda progress: None, Effort.of(part).light).evaluations
        return min((each.iteration_s for each in found), default=math.inf)

    return search_on


@dataclass(kw_only=True)
class _Exploration:
    inputs: Inputs
    search_on: Search
    part_of: PartOf
    short: Search
    stock_s: Mapping[Selection, float]
    report: Report
    points: dict[Selection, Point] = field(default_factory=dict)
    compared: dict[Selection, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.best_stock_s = min(self.stock_s.values(), default=math.inf)
        self.everything = tuple(range(self.inputs.world_size))
        self.is_very_few = self.inputs.world_size <= _VERY_FEW_GPUS
        self.seen = {self.everything}

    @gc_paused()
    def run(self) -> tuple[Point, ...]:
        here = self._searched(self.everything)
        fastest_first = sorted(self.stock_s.items(), key=lambda item: item[1])
        for number, (ranks, stock_s) in enumerate(fastest_first):
            # Its best layout may be faster than it is, on this runtime.
            is_worth_it = number == 0 or stock_s < self._least_s
            if is_worth_it and ranks not in self.points:
                self.seen.add(ranks)
                self._searched(ranks)
        for _ in range(_STEPS):
            for ranks in self._promising(here):
                self._searched(ranks)
            best = min(self.points.values(), key=self._order)
            if best is here:
                break
            here = best
        return tuple(sorted(self.points.values(), key=self._order))

    def _order(self, point: Point) -> tuple[float, int, Selection]:
        """Least is best: all GPUs, unless fewer are worth it; of equal ones fewer GPUs."""
        is_preferred = point.ranks == self.everything and point.iteration_s <= self.best_stock_s
        worth = WORTH_IT if is_preferred else 1.0
        return worth * point.iteration_s, len(point.ranks), point.ranks

    def _searched(self, ranks: Selection) -> Point:
        tokens = self.inputs.global_batch_size * self.inputs.sequence_length
        point = Point(ranks=ranks, iteration_s=self.search_on(ranks), tokens=tokens)
        self.points[ranks] = point
        return point

    def _promising(self, here: Point) -> Iterator[Selection]:
        """Yield selections of fewer GPUs that may be faster, as long as the last one was not."""
        some = self._not_ruled_out(here)
        if not some:
            return
        few = self.inputs.world_size <= _FEW_GPUS
        nodes = "nodes of very few" if self.is_very_few else "nodes"
        rows = []
        for done, less in enumerate(some):
            phase = f"{len(less.ranks)} of {self.inputs.world_size} GPUs"
            self.report(SearchProgress(phase=phase, done=done, total=len(some)))
            found_s = self._in_short(less.ranks) if few else self._estimate(less.ranks)
            how = (nodes if less.of_nodes else "parts") if few else "many"
            rows.append((found_s / _WORTH_A_SEARCH[how], len(less.ranks), less.ranks))
        missed = min(1.0, here.iteration_s / self._in_short(here.ranks)) if few else 1.0
        for expected_s, _, ranks in sorted(rows)[: _SEARCHED if few else _SEARCHED_OF_MANY]:
            if expected_s < math.inf and missed * expected_s < self._least_s:
                yield ranks

    @property
    def _least_s(self) -> float:
        """What another selection must be faster than."""
        return min(self._order(point)[0] for point in self.points.values())

    def _not_ruled_out(self, here: Point) -> list[Fewer]:
        """Those less by a part whose lower bound of the iteration is short enough.

        No more than are compared: first those that spare slow links, then those of low bounds.
        """
        bound = link_bound(self.part_of(here.ranks))
        is_even = len({self.inputs.kinds[rank] for rank in here.ranks}) == 1 and bound.link is None
        found: list[tuple[bool, float, Fewer]] = []
        for less in fewer(self.inputs, here.ranks):
            if less.ranks in self.seen or (is_even and not less.of_nodes):
                continue
            self.seen.add(less.ranks)
            limit_s = self._least_s * (1.0 if less.of_nodes else _BEST_EFFICIENCY)
            bound_s = link_bound(self.part_of(less.ranks)).bound_s
            if bound_s < limit_s:
                found.append((not less.slow_links, bound_s, less))
        found.sort(key=lambda row: row[:2])
        most = _COMPARED_OF_VERY_FEW if self.is_very_few else _COMPARED
        return [row[2] for row in found[:most]]

    def _in_short(self, ranks: Selection) -> float:
        if ranks not in self.compared:
            self.compared[ranks] = self.short(ranks)
        return self.compared[ranks]

    def _estimate(self, ranks: Selection) -> float:
        part = self.part_of(ranks)
        return QuickEstimate(inputs=part).iteration_s(part)
