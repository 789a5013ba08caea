"""SPLIT on the topology graph: cut the cheapest component in two until there are k.

Saran and Vazirani, "Finding k cuts within twice the optimal" (SIAM J. Comput. 24(1), 1995); the
Zorse paper (MLSys 2026) uses it to group GPUs. The cut of k components costs at most 2 - 2/k times
the cheapest one; on a tree it is the cheapest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from zorse_megatron.planner.groupings.grouping import Grouping, hardware_key, normalised
from zorse_megatron.planner.groupings.mincut import Cut, cheapest_cut, reduce_graph
from zorse_megatron.topology.cluster_topology import Topology
from zorse_megatron.topology.graph import Vertex, gpu, host, inner_graph, node_graph


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
        numbers: dict[object, int] = {}
        self._class_of = {
            host(index): numbers.setdefault(hardware_key(node), len(numbers))
            for index, node in enumerate(spec.nodes)
        }
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
