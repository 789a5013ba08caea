"""The exact minimum cut of a component that leaves GPUs on both sides.

Three facts make it fast on graphs of clusters:

1. A vertex without GPUs that has one neighbour never matters, and one with two neighbours is as
   good as an edge with the smaller of the two capacities (`reduce_graph`).
2. A minimal cut lies within one biconnected component, and a bridge is a cut by itself. A cluster
   is almost a tree, so its components are bridges, single nodes and the links between regions.
3. What is left is solved by Stoer-Wagner (J. ACM 44(4), 1997), O(n m + n^2 log n) for a component
   of n vertices and m edges.

Stoer-Wagner knows no GPUs and may cut off a switch alone where that is cheaper than any cut that
is of use. It happens in odd networks only, and is then settled by maximum flows.
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass

import networkx as nx

from zorse_megatron.topology.graph import CAPACITY, Vertex

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
