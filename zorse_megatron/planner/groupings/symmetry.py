"""Groupings that are equal up to the names of identical nodes, switches and GPUs."""

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from zorse_megatron.costs.topology import Topology
from zorse_megatron.planner.groupings.pools import Grouping, hardware_key

_IN_GROUP = 16  # labels of edges of the network are below


class Symmetry:
    """Signatures of groupings: equal when identical nodes, switches or GPUs changed places.

    Equal GPUs of a node are one vertex, so only counts matter; a grouping is a graph of groups,
    such vertices and the network above. A group starts with a colour that tells its own shape: how
    many GPUs it has in which vertices below which switches (a hash of that tree, from the leaves
    up). Then colour refinement (Weisfeiler and Leman, 1968) mixes into each vertex's colour the
    multiset of its neighbours' colours until nothing is told apart that was not before.
    O((vertices + their pairs with groups) * rounds), in numpy.

    Equivalent groupings always get equal signatures. The reverse fails only for groupings that
    chain parts of nodes to circles (two circles of two against one of four); one is then lost.
    """

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self._network = _NetworkArrays.of(spec)

    def signature(self, grouping: Grouping) -> int:
        """The signature of a grouping."""
        network, num_groups = self._network, len(grouping)
        group_of = np.repeat(np.arange(num_groups), [len(group) for group in grouping])
        gpu_vertices = self._vertex_of[np.fromiter(chain.from_iterable(grouping), dtype=np.int64)]
        keys, counts = np.unique(group_of * network.size + gpu_vertices, return_counts=True)
        groups, gpu_vertices = keys // network.size, keys % network.size
        shapes = self._shapes(groups, gpu_vertices, counts, num_groups)
        colours = np.concatenate([network.colours, shapes])
        labels = _mixed(counts + _IN_GROUP)
        return _refined(
            _mixed(colours),
            np.concatenate([network.sources, groups + network.size, gpu_vertices]),
            np.concatenate([network.targets, gpu_vertices, groups + network.size]),
            np.concatenate([network.labels, labels, labels]),
        )

    def _shapes(
        self, groups: np.ndarray, gpu_vertices: np.ndarray, counts: np.ndarray, num_groups: int
    ) -> np.ndarray:
        """For each group a hash of its tree of counts."""
        network = self._network
        # What has been heard so far at each (group, vertex), as keys in ascending order.
        keys, heard = groups * network.size + gpu_vertices, counts.astype(np.uint64)
        for depth in range(int(network.depths.max()), 0, -1):
            vertices = keys % network.size
            here = network.depths[vertices] == depth
            told = _mixed(network.colours[vertices] + _mixed(heard))
            up = keys - vertices + network.parents[vertices]
            keys, places = np.unique(np.where(here, up, keys), return_inverse=True)
            sums = np.zeros(len(keys), dtype=np.uint64)
            np.add.at(sums, places, np.where(here, told, heard))
            heard = sums
        shapes = np.zeros(num_groups, dtype=np.uint64)
        roots = network.colours[keys % network.size]
        np.add.at(shapes, keys // network.size, _mixed(roots + _mixed(heard)))
        return shapes

    @cached_property
    def _vertex_of(self) -> np.ndarray:
        vertices = self._network.vertex_of
        return np.array(
            [
                vertices[index, kind]
                for index, node in enumerate(self.spec.nodes)
                for kind in node.gpu_kinds
            ]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _NetworkArrays:
    """The cluster without groups as arrays: a tree of GPU vertices, nodes, switches and regions."""

    vertex_of: dict[tuple[int, str], int]
    """(node, GPU kind) -> vertex."""
    colours: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    labels: np.ndarray

    @property
    def size(self) -> int:
        return len(self.colours)

    @classmethod
    def of(cls, spec: Topology) -> "_NetworkArrays":
        """Number the vertices, parents before children. O(GPUs + switches)."""
        numbers: dict[Any, int] = {}
        looks: list[Any] = []
        parents: list[int] = []

        def add(vertex: Any, look: Any, above: Any = None) -> None:
            parents.append(len(numbers) if above is None else numbers[above])
            numbers[vertex] = len(numbers)
            looks.append(look)

        for region in spec.regions:
            add(("region", region), "region")
        for switch in sorted(spec.switches, key=lambda s: len(spec.switches_above(s.name))):
            look = (spec.uplink_bytes_per_s.get(switch.name), switch.uplink_latency_s)
            add(("switch", switch.name), look, _above(switch.region, switch.uplink_to))
        for index, node in enumerate(spec.nodes):
            add(("node", index), hardware_key(node), _above(node.region, node.switch))
            for kind in dict.fromkeys(node.gpu_kinds):
                add((index, kind), kind, ("node", index))
        edges = [(child, parent, 1) for child, parent in enumerate(parents) if child != parent]
        for link in spec.region_links:
            add(link, (link.bandwidth_bytes_per_s, link.latency_s))
            edges += [(numbers[link], numbers["region", region], 2) for region in link.regions]
        return cls._from_lists(numbers, looks, parents, edges)

    @classmethod
    def _from_lists(
        cls,
        numbers: dict[Any, int],
        looks: list[Any],
        parents: list[int],
        edges: list[tuple[int, int, int]],
    ) -> "_NetworkArrays":
        known = {look: number for number, look in enumerate(dict.fromkeys(looks), start=1)}
        depths: list[int] = []
        for vertex, parent in enumerate(parents):
            depths.append(0 if vertex == parent else depths[parent] + 1)
        both = [*edges, *((second, first, label + 8) for first, second, label in edges)]
        table = np.array(both, dtype=np.int64).reshape(-1, 3)
        return cls(
            vertex_of=numbers,
            colours=_mixed(np.array([known[look] for look in looks])),
            parents=np.array(parents),
            depths=np.array(depths),
            sources=table[:, 0],
            targets=table[:, 1],
            labels=_mixed(table[:, 2]),
        )


def _above(region: str, switch: str | None) -> tuple[str, str]:
    return ("region", region) if switch is None else ("switch", switch)


def _refined(
    colours: np.ndarray, sources: np.ndarray, targets: np.ndarray, labels: np.ndarray
) -> int:
    num_colours = 0
    while (now := len(np.unique(colours))) > num_colours:
        num_colours = now
        heard = np.zeros_like(colours)
        # A sum does not depend on the order of the neighbours; mixing first keeps them apart.
        np.add.at(heard, targets, _mixed(colours[sources] ^ labels))
        colours = _mixed(colours + _mixed(heard))
    return int(_mixed(colours).sum())


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), for each element."""
    values = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
