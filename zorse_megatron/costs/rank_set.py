"""The network view of a collective over a set of ranks: nodes, not pairs of ranks.

A ring visits the nodes one after the other, those on one switch and in one region together. It
enters and leaves each node once, so the node's NICs carry the ring's traffic once, whatever the
number of ranks on the node; the same holds for the uplink of a switch.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.topology.cluster_topology import MeasuredNode, Topology
from zorse_megatron.topology.link_curves import Curves, curve_for
from zorse_megatron.topology.routes import DirectedLink, Routes


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Bandwidth of several links in a row: constants, and curves for this many sharers."""

    constant_bytes_per_s: float
    curves: tuple[tuple[Curves, int], ...] = ()

    def at(self, message_bytes: float) -> float:
        """The lowest of all for messages of this size. O(distinct curves)."""
        rates = (
            curve_for(curves, sharing).bytes_per_s(message_bytes) for curves, sharing in self.curves
        )
        return min((self.constant_bytes_per_s, *rates))


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """The ranks of a set that are on one node."""

    count: int
    rate: Rate
    step_latency_s: float
    floor_s: float
    """A message of no size inside the node, by the curves where there are some."""


@dataclass(frozen=True, kw_only=True)
class RankSet:
    """Ranks of one collective, as a ring over nodes."""

    num_ranks: int
    nodes: tuple[LocalRanks, ...]
    """In ring order."""
    inside: tuple[LocalRanks, ...]
    """The different kinds of nodes with two ranks or more."""
    between: Rate
    """What the ring gets between nodes; infinite with one node."""
    crossing_s: tuple[float, ...]
    """Latency from each node to the next, the last to the first."""
    near_latency_s: float
    """Longest time of a message of no size between nodes of one region."""
    far_latency_s: float
    """The same between regions; 0 in one region."""
    num_regions: int

    @property
    def ring_latency_s(self) -> float:
        """Latency of the longest way round: all steps but the shortest."""
        steps_s = sum((node.count - 1) * node.step_latency_s for node in self.nodes)
        alone = len(self.nodes) == 1
        crossings = (self.nodes[0].step_latency_s,) if alone else self.crossing_s
        shortest = min(*crossings, *(node.step_latency_s for node in self.inside), math.inf)
        return steps_s + sum(crossings) - (shortest if shortest < math.inf else 0.0)

    def ring_rate(self, message_bytes: float) -> float:
        """Bandwidth of the whole ring."""
        return min(
            self.between.at(message_bytes),
            *(node.rate.at(message_bytes) for node in self.inside),
            math.inf,
        )


class RankSets:
    """Summarises sets of ranks of one cluster; what nodes that look alike add to them is kept.

    A search asks for thousands of sets of the same nodes.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        spec = routes.spec
        numbers = range(len(spec.nodes))
        looks: dict[object, int] = {}
        self._look = [looks.setdefault(_look(node), len(looks)) for node in spec.nodes]
        in_order = sorted(numbers, key=lambda node: (*_location(spec, node), node))
        self._place = {node: place for place, node in enumerate(in_order)}
        self._local: dict[tuple[int, int], LocalRanks] = {}
        self._crossings: dict[tuple[int, int], _Crossing] = {}
        self._exits: dict[tuple[int, tuple[int, ...]], float] = {}

    def of(self, ranks: tuple[int, ...]) -> RankSet:
        """Summarise a set of ranks. O(ranks + nodes * length of a route)."""
        spec = self._routes.spec
        on_node: dict[int, list[int]] = {}
        for rank, owner in zip(ranks, map(spec.node_of, ranks), strict=True):
            on_node.setdefault(owner, []).append(rank)
        order = sorted(on_node, key=self._place.__getitem__)
        nodes = tuple(self._local_of(node, len(on_node[node])) for node in order)
        crossings = [
            self._crossing(first, second)
            for first, second in zip(order, order[1:] + order[:1], strict=True)
            if first != second
        ]
        kinds = tuple({id(each): each for each in crossings}.values())
        inside = {id(node): node for node in nodes if node.count > 1}  # equal ones are mostly one
        return RankSet(
            num_ranks=len(ranks),
            nodes=nodes,
            inside=tuple(dict.fromkeys(inside.values())),
            between=self._between(on_node, crossings),
            crossing_s=tuple(crossing.latency_s for crossing in crossings),
            near_latency_s=max((each.floor_s for each in kinds if not each.is_far), default=0.0),
            far_latency_s=max((each.floor_s for each in kinds if each.is_far), default=0.0),
            num_regions=len({spec.nodes[node].region for node in order}),
        )

    def _local_of(self, index: int, count: int) -> LocalRanks:
        key = self._look[index], count
        if key not in self._local:
            self._local[key] = _local(self._routes.spec.nodes[index], count)
        return self._local[key]

    def _crossing(self, first: int, second: int) -> "_Crossing":
        key = self._look[first], self._look[second]
        if key not in self._crossings:
            nodes = self._routes.spec.nodes
            self._crossings[key] = _Crossing(
                ends=(nodes[first], nodes[second]), links=self._routes.between_nodes(first, second)
            )
        return self._crossings[key]

    def _between(self, on_node: dict[int, list[int]], crossings: list["_Crossing"]) -> Rate:
        """NICs of every node, and links between nodes by how often the ring passes them."""
        if len(on_node) == 1:
            return Rate(constant_bytes_per_s=math.inf)
        passes: Counter[DirectedLink] = Counter()
        times = Counter(map(id, crossings))
        for number, crossing in {id(each): each for each in crossings}.items():
            for link in crossing.links:
                passes[link] += times[number]
        rates = [link.bytes_per_s / count for link, count in passes.items()]
        curves: dict[tuple[Curves, int], None] = {}
        for index, ranks in on_node.items():
            node = self._routes.spec.nodes[index]
            if node.nic_curves:  # measured from the GPUs on
                curves[node.nic_curves, len(ranks)] = None
            else:
                rates.append(self._exit_bytes_per_s(index, tuple(ranks)))
        return Rate(constant_bytes_per_s=min(rates, default=math.inf), curves=tuple(curves))

    def _exit_bytes_per_s(self, index: int, ranks: tuple[int, ...]) -> float:
        """What GPUs of a node get through their host links and ports together."""
        key = index, ranks
        if key not in self._exits:
            spec = self._routes.spec
            node = spec.nodes[index]
            ports = {node.port_of(rank - spec.first_ranks[index]) for rank in ranks}
            self._exits[key] = min(
                len(ranks) * node.host_link_bytes_per_s, len(ports) * node.port_bytes_per_s
            )
        return self._exits[key]


def _look(node: MeasuredNode) -> tuple[object, ...]:
    """Equal for nodes that are the same in a ring."""
    return (
        node.region,
        node.switch,
        node.link,
        node.intra_curves,
        node.nic_curves,
        node.nic_to_switch_latency_s,
    )


@dataclass(frozen=True, kw_only=True)
class _Crossing:
    """The ring's way from one node to the next."""

    ends: tuple[MeasuredNode, MeasuredNode]
    links: tuple[DirectedLink, ...]

    @cached_property
    def is_far(self) -> bool:
        """Whether it leaves the region."""
        return self.ends[0].region != self.ends[1].region

    @cached_property
    def latency_s(self) -> float:
        """Without what measured curves contain."""
        return sum(node.nic_to_switch_latency_s for node in self.ends) + sum(
            link.latency_s for link in self.links
        )

    @cached_property
    def floor_s(self) -> float:
        """Time of a message of no size, measured curves included."""
        measured = (
            curve_for(node.nic_curves, 1).transfer_s(0) for node in self.ends if node.nic_curves
        )
        return self.latency_s + max(measured, default=0.0)


def _location(spec: Topology, index: int) -> tuple[str, tuple[str, ...]]:
    """Region, then switches from the top: nodes that share much come next to one another."""
    node = spec.nodes[index]
    chain = spec.switches_above(node.switch)
    return node.region, tuple(switch.name for switch in reversed(chain))


def _local(node: MeasuredNode, count: int) -> LocalRanks:
    if not node.intra_curves:
        rate = Rate(constant_bytes_per_s=node.link.bandwidth_bytes_per_s)
        return LocalRanks(
            count=count, rate=rate, step_latency_s=node.link.latency_s, floor_s=node.link.latency_s
        )
    # The curve's own floor is the latency, paid with every message.
    rate = Rate(constant_bytes_per_s=math.inf, curves=((node.intra_curves, count),))
    floor_s = curve_for(node.intra_curves, count).transfer_s(0)
    return LocalRanks(count=count, rate=rate, step_latency_s=0.0, floor_s=floor_s)
