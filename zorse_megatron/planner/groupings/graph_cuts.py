"""SPLIT on the topology graph: the cheapest component is cut in two, until there are k.

Saran and Vazirani, "Finding k cuts within twice the optimal" (SIAM J. Comput. 24(1), 1995); the
Zorse paper (MLSys 2026) uses it to group GPUs. The cut of k components costs at most 2 - 2/k times
the cheapest one; on a tree it is the cheapest.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

import networkx as nx

from zorse_megatron.costs.topology import (
    CAPACITY,
    Topology,
    Vertex,
    gpu,
    host,
    inner_graph,
    node_graph,
    numbered,
)
from zorse_megatron.planner.groupings.pools import Grouping, hardware_key, normalised


@dataclass(frozen=True, kw_only=True)
class SplitStep:
    """k groups, and the capacity of all links cut so far."""

    grouping: Grouping
    cut_bytes_per_s: float


def split_groupings(spec: Topology, max_groups: int) -> Iterator[SplitStep]:
    """Yield SPLIT's groupings for k = 1, 2, ... up to `max_groups` or one GPU per group.

    Nodes are single vertices until a cut inside one is cheaper than any between nodes; identical
    nodes share the search inside. O(k * (nodes + switches)), and what `cheapest_cut` says.
    """
    splitter = _Splitter(spec)
    components = [splitter.whole()]
    cut_bytes_per_s = 0.0
    yield SplitStep(grouping=_grouping(components), cut_bytes_per_s=0.0)
    while len(components) < max_groups:
        best = min(components, key=lambda component: component.capacity)
        if best.cut is None:
            return
        cut_bytes_per_s += best.cut.capacity
        components.append(splitter.part(best))
        yield SplitStep(grouping=_grouping(components), cut_bytes_per_s=cut_bytes_per_s)


class _Component:
    """A connected piece; its terminals are whole nodes and, where a node was opened, GPUs."""

    def __init__(self, graph: nx.Graph, ranks: dict[Vertex, tuple[int, ...]]) -> None:
        self.graph = graph
        self.ranks = ranks
        self.cut: Cut | None = None

    @property
    def capacity(self) -> float:
        return float("inf") if self.cut is None else self.cut.capacity


def _grouping(components: list[_Component]) -> Grouping:
    return normalised(
        [rank for ranks in component.ranks.values() for rank in ranks] for component in components
    )


class _Splitter:
    """Finds cuts of components; knows the cheapest cut inside each class of nodes."""

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        classes = enumerate(numbered(map(hardware_key, spec.nodes)))
        self._class_of = {host(index): each for index, each in classes}
        self._inside: dict[tuple[int, bool], float] = {}

    def whole(self) -> _Component:
        """The whole cluster."""
        ranks = {host(i): tuple(self.spec.ranks_of(i)) for i in range(len(self.spec.nodes))}
        graph = node_graph(self.spec)
        component = _Component(graph, ranks)
        reduce_graph(graph, ranks.keys(), list(graph))
        self._find_cut(component)
        return component

    def part(self, component: _Component) -> _Component:
        """Cut a component in two: it keeps the larger piece and the other one is returned."""
        assert component.cut is not None
        graph, side = component.graph, component.cut.side
        if 2 * len(side) > len(graph):
            side = frozenset(graph) - side
        ranks = {vertex: component.ranks.pop(vertex) for vertex in side & component.ranks.keys()}
        other = _Component(graph.subgraph(side).copy(), ranks)
        border = {vertex for inside in side for vertex in graph[inside]} - side
        graph.remove_nodes_from(side)
        reduce_graph(graph, component.ranks.keys(), border)
        reduce_graph(other.graph, ranks.keys(), list(other.graph))
        self._find_cut(component)
        self._find_cut(other)
        return other

    def _find_cut(self, component: _Component) -> None:
        component.cut = cheapest_cut(component.graph, component.ranks.keys())
        inside, node = self._cheapest_inside(component)
        if node is not None and inside < component.capacity:
            self._open(component, node)
            component.cut = cheapest_cut(component.graph, component.ranks.keys())

    def _cheapest_inside(self, component: _Component) -> tuple[float, Vertex | None]:
        """The closed node with the cheapest cut inside, the first one of several."""
        is_attached = len(component.ranks) > 1
        closed = sorted(vertex for vertex in component.ranks if vertex[0] == "node")
        first = {self._class_of[vertex]: vertex for vertex in reversed(closed)}
        costs = [(self._inside_cost(vertex, is_attached), vertex) for vertex in first.values()]
        return min(costs, default=(float("inf"), None))

    def _inside_cost(self, vertex: Vertex, is_attached: bool) -> float:
        """Cheapest cut inside a node; its host side counts if more hangs on it."""
        key = (self._class_of[vertex], is_attached)
        if key not in self._inside:
            graph = inner_graph(self.spec, vertex[1])
            terminals = {each for each in graph if each[0] == "gpu"}
            terminals |= {vertex} if is_attached else set()
            reduce_graph(graph, terminals, list(graph))
            cut = cheapest_cut(graph, terminals)
            self._inside[key] = float("inf") if cut is None else cut.capacity
        return self._inside[key]

    def _open(self, component: _Component, node: Vertex) -> None:
        """Replace a node by its GPUs and what is between them."""
        ranks = component.ranks.pop(node)
        component.ranks.update({gpu(rank): (rank,) for rank in ranks})
        inner = inner_graph(self.spec, node[1])
        component.graph.update(inner)
        reduce_graph(component.graph, component.ranks.keys(), [node, *inner])


# The exact minimum cut of a component that leaves GPUs on both sides.
#
# Three facts make it fast on graphs of clusters:
#
# 1. A vertex without GPUs that has one neighbour never matters, and one with two neighbours is as
#    good as an edge with the smaller of the two capacities (`reduce_graph`).
# 2. A minimal cut lies within one biconnected component, and a bridge is a cut by itself. A cluster
#    is almost a tree, so its components are bridges, single nodes and the links between regions.
# 3. What is left is solved by Stoer-Wagner (J. ACM 44(4), 1997), O(n m + n^2 log n) for a component
#    of n vertices and m edges.
#
# Stoer-Wagner knows no GPUs and may cut off a switch alone where that is cheaper than any cut that
# is of use. It happens in odd networks only, and is then settled by maximum flows.


_LEVELS = {kind: i for i, kind in enumerate(("region", "switch", "node", "nic", "fabric", "gpu"))}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Edges of this capacity in total part `side` from all other vertices."""

    capacity: float
    side: frozenset[Vertex]


def reduce_graph(graph: nx.Graph, terminals: Set[Vertex], around: Iterable[Vertex]) -> None:
    """Remove vertices that are no terminals and have one or two neighbours, in place.

    No cut between terminals becomes cheaper or dearer. `around`: where to begin (all vertices, or
    those whose neighbourhood has changed). O(vertices removed).
    """
    queue = sorted((vertex for vertex in around if vertex not in terminals), key=_order)
    while queue:
        vertex = queue.pop()
        if vertex not in graph or graph.degree(vertex) > 2:
            continue
        neighbours = [(other, edge[CAPACITY]) for other, edge in graph[vertex].items()]
        graph.remove_node(vertex)
        if len(neighbours) == 2:
            (first, one), (second, other) = neighbours
            there = graph.get_edge_data(first, second, {CAPACITY: 0.0})[CAPACITY]
            graph.add_edge(first, second, **{CAPACITY: there + min(one, other)})
        queue += [neighbour for neighbour, _ in neighbours if neighbour not in terminals]


def cheapest_cut(graph: nx.Graph, terminals: Set[Vertex]) -> Cut | None:
    """The cheapest cut with terminals on both sides; None if there are fewer than two.

    `graph` is connected and reduced. Of equally cheap cuts the one nearest to the core of the
    network is taken (then by the order of the vertices), so the result depends on nothing else.
    O(vertices + edges), and Stoer-Wagner on what is not a tree.
    """
    found: list[tuple[float, tuple[tuple[int, str], ...], frozenset[Vertex], Set[Vertex]]] = []
    blocks = list(nx.biconnected_components(graph))
    memberships = Counter(vertex for block in blocks for vertex in block)
    joints = {vertex for vertex, count in memberships.items() if count > 1}
    for block in blocks:
        # Behind every joint there are terminals, or it would have been removed.
        held = {vertex for vertex in block if vertex in terminals or vertex in joints}
        cut = _cut_of_block(graph, block, held)
        if cut is not None:
            found.append((cut.capacity, _tie_break(block), cut.side, block))
    if not found:
        return None
    least = min(capacity for capacity, *_ in found)
    _, _, side, block = min((each for each in found if each[0] == least), key=lambda each: each[1])
    return Cut(capacity=least, side=_behind(graph, side, block))


def _cut_of_block(graph: nx.Graph, block: Set[Vertex], held: Set[Vertex]) -> Cut | None:
    """The cheapest cut of one biconnected component that parts its terminals."""
    if len(held) < 2:
        return None
    if len(block) == 2:
        first, second = sorted(block, key=_order)
        return Cut(capacity=graph.edges[first, second][CAPACITY], side=frozenset((second,)))
    part = nx.Graph()
    # In order: Stoer-Wagner resolves ties by the order of insertion, and sets have none.
    part.add_nodes_from(sorted(block, key=_order))
    for vertex in list(part):
        for other in sorted(graph[vertex].keys() & block, key=_order):
            part.add_edge(vertex, other, **{CAPACITY: graph.edges[vertex, other][CAPACITY]})
    capacity, (first, second) = nx.stoer_wagner(part, weight=CAPACITY)
    sides = (frozenset(first), frozenset(second))
    side = min(sides, key=lambda one: (len(one), sorted(map(_order, one))))
    if side & held and held - side:
        return Cut(capacity=capacity, side=side)
    return _cut_by_flows(part, held)


def _cut_by_flows(graph: nx.Graph, held: Set[Vertex]) -> Cut:
    """The same from maximum flows: some terminal is parted from the first one."""
    source, *others = sorted(held, key=_order)
    cuts = [nx.minimum_cut(graph, source, other, capacity=CAPACITY) for other in others]
    capacity, (_, side) = min(cuts, key=lambda cut: cut[0])
    return Cut(capacity=capacity, side=frozenset(side))


def _behind(graph: nx.Graph, side: Set[Vertex], block: Set[Vertex]) -> frozenset[Vertex]:
    """Everything that hangs on one side of a block once the other side is gone."""
    reached, queue = set(side), list(side)
    other = block - side
    while queue:
        for neighbour in graph[queue.pop()]:
            if neighbour not in reached and neighbour not in other:
                reached.add(neighbour)
                queue.append(neighbour)
    return frozenset(reached)


def _tie_break(block: Set[Vertex]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted(map(_order, block)))


def _order(vertex: Vertex) -> tuple[int, str]:
    """From the core to the GPUs; numbers padded so that they sort as numbers."""
    kind, key = vertex
    return _LEVELS[kind], f"{key:012d}" if isinstance(key, int) else str(key)
