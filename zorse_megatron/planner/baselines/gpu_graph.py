"""SPLIT on the complete graph of GPUs, as in the Zorse paper (MLSys 2026, planner, phase 1).

This is the baseline strategy `zorse-paper`, kept as it is: vertices are GPUs, the weight of a pair
is the bandwidth between the two when all else is idle, so a NIC that eight GPUs share is counted
for every pair. The authors' code tries k = 1 to the number of nodes. Its cuts peel off single GPUs
where a node's inner links are slow: on such a graph that is the cheapest cut.

The cut is exact and yet cheap, because a cheapest cut never halves a class of twins. Let x of the
n GPUs of a node lie on one side. The cut's weight is concave in x (x (n - x) times the inner
bandwidth, plus something linear), so the least is at an end of what is allowed: the node stays
whole, or a single GPU goes. The same holds for equal nodes as wholes. What remains are cuts between
classes of equal nodes (Stoer-Wagner on the graph of classes), one node, and one GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from zorse_megatron.planner.groupings.grouping import hardware_key, normalised
from zorse_megatron.planner.groupings.split import SplitStep
from zorse_megatron.topology.cluster_topology import Topology
from zorse_megatron.topology.graph import attachment
from zorse_megatron.topology.routes import Routes

_Piece = dict[int, tuple[int, ...]]
"""Ranks of one component on each of its nodes."""


def pair_bytes_per_s(routes: Routes, first: int, second: int) -> float:
    """Weight of the edge between two GPUs."""
    return routes.route(first, second).bytes_per_s


def paper_groupings(spec: Topology, max_groups: int | None = None) -> Iterator[SplitStep]:
    """Yield the groupings for k = 1, 2, ... up to `max_groups` (default: the number of nodes).

    O(k * (nodes + classes^3)), where a class is all that is left of equal nodes on one switch.
    """
    cutter = _Cutter(spec)
    pieces: list[_Piece] = [{i: tuple(spec.ranks_of(i)) for i in range(len(spec.nodes))}]
    cuts = [cutter.cheapest(pieces[0])]
    total = 0.0
    yield _step(pieces, total)
    for _ in range(1, min(max_groups or len(spec.nodes), spec.num_gpus)):
        number = min(range(len(pieces)), key=lambda i: cuts[i].weight)
        side = cuts[number].side
        total += cuts[number].weight
        pieces.append(side)
        pieces[number] = _without(pieces[number], side)
        cuts.append(cutter.cheapest(side))
        cuts[number] = cutter.cheapest(pieces[number])
        yield _step(pieces, total)


@dataclass(frozen=True, kw_only=True)
class _Peel:
    """A cut of a piece: its weight, and what goes."""

    weight: float
    side: _Piece


def _step(pieces: list[_Piece], total: float) -> SplitStep:
    ranks = ([rank for on_node in piece.values() for rank in on_node] for piece in pieces)
    return SplitStep(grouping=normalised(ranks), cut_bytes_per_s=total)


def _without(piece: _Piece, side: _Piece) -> _Piece:
    rest = {
        node: tuple(rank for rank in ranks if rank not in side.get(node, ()))
        for node, ranks in piece.items()
    }
    return {node: ranks for node, ranks in rest.items() if ranks}


class _Cutter:
    """Finds the cheapest cut of a piece of the complete graph."""

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self.routes = Routes(spec)
        numbers: dict[object, int] = {}
        self._kind_of = [
            numbers.setdefault((attachment(node), *hardware_key(node)), len(numbers))
            for node in spec.nodes
        ]

    def cheapest(self, piece: _Piece) -> _Peel:
        """The cheapest cut; of infinite weight if there is but one GPU."""
        classes: dict[tuple[int, int], list[int]] = {}
        for node in sorted(piece):
            classes.setdefault((self._kind_of[node], len(piece[node])), []).append(node)
        members = list(classes.values())
        inner, between = self._weights(members)
        sizes = np.array([len(piece[nodes[0]]) for nodes in members], dtype=float)
        counts = np.array([len(nodes) for nodes in members], dtype=float)
        # What one GPU of each class has to GPUs of other nodes, its own class included.
        outward = between @ (sizes * counts) - np.diag(between) * sizes
        cuts = [
            *_class_cut(piece, members, between, sizes * counts),
            *_one_node(piece, members, sizes * outward),
            *_one_gpu(piece, members, (sizes - 1) * inner + outward),
        ]
        return min(cuts, key=lambda cut: cut.weight, default=_Peel(weight=float("inf"), side={}))

    def _weights(self, members: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Bandwidth of pairs inside a node of each class, and of pairs between nodes."""
        inner = np.array([self._inner(nodes[0]) for nodes in members])
        between = np.zeros((len(members), len(members)))
        for i, first in enumerate(members):
            for j, second in enumerate(members[: i + 1]):
                # Two nodes of one class are on the same switch.
                pair = (first[0], second[0]) if i != j else (first[0], first[-1])
                if pair[0] != pair[1]:
                    ranks = (self.spec.first_ranks[node] for node in pair)
                    between[i, j] = between[j, i] = pair_bytes_per_s(self.routes, *ranks)
        return inner, between

    def _inner(self, node: int) -> float:
        ranks = self.spec.ranks_of(node)
        return pair_bytes_per_s(self.routes, *ranks[:2]) if len(ranks) > 1 else 0.0


def _class_cut(
    piece: _Piece, members: list[list[int]], between: np.ndarray, num_gpus: np.ndarray
) -> Iterator[_Peel]:
    if len(members) > 1:
        weight, side = stoer_wagner_dense(between * np.outer(num_gpus, num_gpus))
        nodes = [node for number in side for node in members[number]]
        yield _Peel(weight=weight, side={node: piece[node] for node in nodes})


def _one_node(piece: _Piece, members: list[list[int]], weights: np.ndarray) -> Iterator[_Peel]:
    if len(piece) > 1:
        best = int(np.argmin(weights))
        node = members[best][0]
        yield _Peel(weight=float(weights[best]), side={node: piece[node]})


def _one_gpu(piece: _Piece, members: list[list[int]], weights: np.ndarray) -> Iterator[_Peel]:
    if sum(map(len, piece.values())) > 1:
        best = int(np.argmin(weights))
        node = members[best][0]
        yield _Peel(weight=float(weights[best]), side={node: piece[node][:1]})


def stoer_wagner_dense(weights: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """Cheapest cut of a complete graph: its weight and the smaller side. O(n^3), in numpy.

    Stoer and Wagner, J. ACM 44(4), 1997. `weights` is symmetric, its diagonal is ignored.
    """
    weights = weights.astype(float).copy()
    np.fill_diagonal(weights, 0.0)
    merged = [[number] for number in range(len(weights))]
    best, side = float("inf"), tuple[int, ...]()
    alive = np.ones(len(weights), dtype=bool)
    for left in range(len(weights), 1, -1):
        last, before, cut = _phase(weights, alive, left)
        if cut < best:
            best, side = cut, tuple(merged[last])
        merged[before] += merged[last]
        weights[before] += weights[last]
        weights[:, before] += weights[:, last]
        weights[before, before] = 0.0
        alive[last] = False
    if 2 * len(side) > len(weights):
        side = tuple(set(range(len(weights))) - set(side))
    return best, tuple(sorted(side))


def _phase(weights: np.ndarray, alive: np.ndarray, left: int) -> tuple[int, int, float]:
    """Add the vertex that is tied most tightly until one is left: (last, the one before, cut)."""
    last = before = int(np.argmax(alive))
    ties = np.where(alive, weights[last], -1.0)
    ties[last] = -1.0
    cut = 0.0
    for _ in range(left - 1):
        before, last = last, int(np.argmax(ties))
        cut = float(ties[last])
        ties += np.where(ties >= 0, weights[last], 0.0)
        ties[last] = -1.0
    return last, before, cut
