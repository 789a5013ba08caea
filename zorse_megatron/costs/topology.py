"""The cluster as a graph whose edges are links that are shared, and routes along them.

Whether they fit each other is checked where the cluster file is read (`inputs.cluster_yaml`).
"""

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, Any

from zorse_megatron.costs.link_bandwidth import BandwidthCurve, Curves, LogFit, as_curves, curve_for
from zorse_megatron.inputs.cluster import Cluster, Nics, Node, RegionLink, Switch
from zorse_megatron.inputs.profile import Profile, UnequalShards

if TYPE_CHECKING:
    import networkx as nx


def numbered(looks: Iterable[Hashable]) -> list[int]:
    """Return a number for each look, equal for equal ones, from 0 on as new ones appear.

    >>> numbered("abca")
    [0, 1, 2, 0]
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(look, len(numbers)) for look in looks]


@dataclass(frozen=True, kw_only=True)
class MeasuredNode(Node):
    """A node, and the measured curves of its links, which replace bandwidth and latency.

    `link.bandwidth_bytes_per_s` is what one GPU sends to one other, each way, and `link.type` says
    what is shared inside. `nvswitch`: each GPU has one port to a switch that does not block.
    `nvlink`: each pair of GPUs has a link of its own. `pcie`: through the host, over the PCIe link
    that leads to host memory and NICs as well.
    """

    intra_curves: Curves = ()
    """What each of n GPUs of a ring sends; none: not measured."""
    nic_curves: Curves = ()
    """What n GPUs of the node send to other nodes together; none: not measured."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all kinds together."""
        return len(self.gpu_kinds)

    @cached_property
    def unnamed(self) -> tuple[object, ...]:
        """Equal for nodes in which all is the same but the names, at one switch."""
        fields = dataclasses.fields(self)
        return tuple(getattr(self, f.name) for f in fields if f.name not in {"name", "first_rank"})

    @cached_property
    def adapters(self) -> Nics:
        """Its NICs. Without any there is no other node, and nothing ever takes this link."""
        lone = Nics(count=1, bandwidth_bytes_per_s=self.host_link_bytes_per_s, latency_s=0.0)
        return self.nics or lone

    @cached_property
    def num_ports(self) -> int:
        """What GPUs send through: single NICs, or as many bundles of NICs as there are GPUs.

        NICs are dealt out to the GPUs in order; with fewer NICs than GPUs, neighbours share one.
        """
        return min(self.adapters.count, self.num_gpus)

    @cached_property
    def port_bytes_per_s(self) -> float:
        """Bandwidth of one NIC or bundle."""
        return self.nics_bytes_per_s / self.num_ports

    @cached_property
    def nics_bytes_per_s(self) -> float:
        """Bandwidth of all NICs together."""
        if self.nic_curves:
            return max(curve.max_bytes_per_s for _, curve in self.nic_curves)
        return self.adapters.total_bytes_per_s

    @cached_property
    def peer_bytes_per_s(self) -> float:
        """From one GPU to another one of the node."""
        if self.intra_curves:
            return curve_for(self.intra_curves, 2).max_bytes_per_s
        return self.link.bandwidth_bytes_per_s

    def port_of(self, local_rank: int) -> int:
        """Number of the NIC or bundle that a GPU uses."""
        return local_rank * self.num_ports // self.num_gpus

    @property
    def nic_to_switch_latency_s(self) -> float:
        """Latency of the link from a NIC to its switch; measured curves contain it already."""
        return 0.0 if self.nic_curves else self.adapters.latency_s / 2


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A whole cluster. The core of a region does not block."""

    nodes: tuple[MeasuredNode, ...]
    switches: tuple[Switch, ...] = ()
    region_links: tuple[RegionLink, ...] = ()
    unequal_shards: tuple[UnequalShards, ...] = ()
    """What collectives over unequal shards were measured to cost."""

    @classmethod
    def of(
        cls,
        nodes: Sequence[MeasuredNode],
        switches: Sequence[Switch] = (),
        region_links: Sequence[RegionLink] = (),
        unequal_shards: Sequence[UnequalShards] = (),
    ) -> "Topology":
        """Deal out ranks in the order of the nodes: the first has ranks 0 to num_gpus - 1."""
        stops = accumulate(node.num_gpus for node in nodes)
        return cls(
            nodes=tuple(
                dataclasses.replace(node, first_rank=stop - node.num_gpus)
                for node, stop in zip(nodes, stops, strict=True)
            ),
            switches=tuple(switches),
            region_links=tuple(region_links),
            unequal_shards=tuple(unequal_shards),
        )

    @property
    def num_gpus(self) -> int:
        """Number of ranks."""
        return self.first_ranks[-1]

    @cached_property
    def first_ranks(self) -> tuple[int, ...]:
        """First rank of each node, and the number of ranks at the end."""
        return (0, *accumulate(node.num_gpus for node in self.nodes))

    def node_of(self, rank: int) -> int:
        """Number of the node that a rank is on."""
        if not 0 <= rank < len(self._node_of):
            raise ValueError(f"found rank {rank}; expected one of 0 to {self.num_gpus - 1}")
        return self._node_of[rank]

    def node_with(self, rank: int) -> MeasuredNode:
        """The node that a rank is on."""
        return self.nodes[self.node_of(rank)]

    def kind_of(self, rank: int) -> str:
        """Kind of a rank's GPU."""
        node = self.node_of(rank)
        return self.nodes[node].gpu_kinds[rank - self.first_ranks[node]]

    @cached_property
    def _node_of(self) -> tuple[int, ...]:
        """Asked for all the time: a table."""
        return tuple(at for at, node in enumerate(self.nodes) for _ in range(node.num_gpus))

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(self.first_ranks[node], self.first_ranks[node + 1])

    @cached_property
    def switch_named(self) -> dict[str, Switch]:
        """Switches by name."""
        return {switch.name: switch for switch in self.switches}

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Regions with nodes, and those that only pass traffic on, in order of appearance."""
        named = [node.region for node in self.nodes]
        named += [region for link in self.region_links for region in link.regions]
        return tuple(dict.fromkeys(named))

    def switches_above(self, switch: str | None) -> tuple[Switch, ...]:
        """A switch and those above it, up to the region's core."""
        chain: list[Switch] = []
        while switch is not None:
            chain.append(self.switch_named[switch])
            switch = chain[-1].uplink_to
        return tuple(chain)

    @cached_property
    def uplink_bytes_per_s(self) -> dict[str, float]:
        """What the uplink of each switch with nodes carries; if not said, all that is below it."""
        below: defaultdict[str, float] = defaultdict(float)
        for node in self.nodes:
            if node.switch is not None:
                below[node.switch] += node.nics_bytes_per_s
        # Leaves first, so that what is below a switch is complete when its turn comes.
        for switch in sorted(self.switches, key=lambda s: -len(self.switches_above(s.name))):
            if switch.uplink is not None:
                below[switch.name] = switch.uplink.bandwidth_bytes_per_s
            if switch.uplink_to is not None:
                below[switch.uplink_to] += below[switch.name]
        return dict(below)


# The cluster as a networkx graph whose edges are links that are shared.
#
# Vertices are pairs (kind, key):
#
#     ("gpu", rank)            a GPU
#     ("fabric", node)         the switch between the GPUs of a node (NVSwitch), if it has one
#     ("node", node)           the host side of a node: what its GPUs and its NICs are plugged into
# #     ("switch", name)         a switch between nodes
#     ("region", name)         the core of a region
#
# Edges have `capacity_bytes_per_s` (each way), `latency_s` and `name`. Because all GPUs of a node
# reach other nodes through its NICs, a cut between nodes costs what the NICs carry, whatever the
# number of GPUs; on the complete graph of GPUs the same cut would count one link per pair.


Vertex = tuple[str, Any]
CAPACITY = "capacity_bytes_per_s"


def gpu(rank: int) -> Vertex:
    """The vertex of a GPU."""
    return ("gpu", rank)


def host(node: int) -> Vertex:
    """The vertex of the host side of a node; in `node_graph`, of the whole node."""
    return ("node", node)


def attachment(node: MeasuredNode) -> Vertex:
    """What the NICs of a node are plugged into."""
    return ("region", node.region) if node.switch is None else ("switch", node.switch)


def node_graph(spec: Topology) -> "nx.Graph":
    """Each node, its GPUs and its NICs as one vertex. O(nodes + switches)."""
    graph = _core_graph(spec)
    for index, node in enumerate(spec.nodes):
        # What the GPUs can bring to the NICs together limits a cut as well.
        rate = min(node.nics_bytes_per_s, node.num_gpus * node.host_link_bytes_per_s)
        graph.add_edge(
            host(index),
            attachment(node),
            **_edge(rate, node.nic_to_switch_latency_s, f"{node.name}/nics"),
        )
    return graph


def inner_graph(spec: Topology, node: int) -> "nx.Graph":
    """The GPUs of one node, what is between them, and its host side."""
    import networkx as nx

    graph = nx.Graph()
    for local, rank in enumerate(spec.ranks_of(node)):
        _add_gpu(graph, spec, node, local, rank)
    if spec.nodes[node].link.type == "nvlink":
        _add_mesh(graph, spec, node)
    return graph


def _add_gpu(graph: "nx.Graph", spec: Topology, index: int, local: int, rank: int) -> None:
    node = spec.nodes[index]
    name = f"{node.name}/gpu{local}"
    graph.add_edge(gpu(rank), host(index), **_edge(node.host_link_bytes_per_s, 0.0, f"{name}-pcie"))
    if node.link.type == "nvswitch" and node.num_gpus > 1:
        rate, half_s = node.peer_bytes_per_s, node.link.latency_s / 2
        graph.add_edge(gpu(rank), ("fabric", index), **_edge(rate, half_s, f"{name}-fabric"))


def _add_mesh(graph: "nx.Graph", spec: Topology, index: int) -> None:
    node = spec.nodes[index]
    first = spec.first_ranks[index]
    for i, j in combinations(range(node.num_gpus), 2):
        name = f"{node.name}/gpu{i}-gpu{j}"
        rate, latency_s = node.peer_bytes_per_s, node.link.latency_s
        graph.add_edge(gpu(first + i), gpu(first + j), **_edge(rate, latency_s, name))


def _core_graph(spec: Topology) -> "nx.Graph":
    """Switches with nodes below them, and regions."""
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(("region", region) for region in spec.regions)
    for link in spec.region_links:
        first, second = (("region", region) for region in link.regions)
        name = region_link_name(link.regions)
        graph.add_edge(first, second, **_edge(link.bandwidth_bytes_per_s, link.latency_s, name))
    for switch in spec.switches:
        if switch.name not in spec.uplink_bytes_per_s:
            continue  # nothing is below it
        above = (
            ("region", switch.region) if switch.uplink_to is None else ("switch", switch.uplink_to)
        )
        rate = spec.uplink_bytes_per_s[switch.name]
        name = f"{switch.name}/uplink"
        graph.add_edge(("switch", switch.name), above, **_edge(rate, switch.uplink_latency_s, name))
    return graph


def region_link_name(regions: tuple[str, str]) -> str:
    """The same for both directions."""
    return "--".join(sorted(regions))


def _edge(rate: float, latency_s: float, name: str) -> dict[str, Any]:
    return {CAPACITY: rate, "latency_s": latency_s, "name": name}


# The topology of a cluster as its file describes it.


def topology_of(cluster: Cluster, profile: Profile | None = None) -> Topology:
    """Take over nodes, switches and links; measured curves of a profile replace the file's rates.

    Curves were measured on nodes with one kind of GPU. A node with several kinds keeps the figures
    of the file. Pass no profile to go by the file alone.
    """
    intra_curves = _curves_by_kind(profile, "intra-node")
    nic_curves = _curves_by_kind(profile, "inter-node")
    return Topology(
        nodes=tuple(
            MeasuredNode(
                **vars(node),
                intra_curves=_curves(node, intra_curves),
                nic_curves=_curves(node, nic_curves),
            )
            for node in cluster.nodes
        ),
        switches=cluster.switches,
        region_links=cluster.region_links,
        unequal_shards=profile.unequal_shards if profile else (),
    )


def measured_curves(profile: Profile, kind: str) -> tuple[Curves, Curves]:
    """What was measured inside and between nodes of one kind of GPU; empty where nothing was."""
    links = (_curves_by_kind(profile, link) for link in ("intra-node", "inter-node"))
    inside, between = (curves.get(kind, ()) for curves in links)
    return inside, between


def _curves_by_kind(profile: Profile | None, link: str) -> dict[str, Curves]:
    found: dict[str, list[tuple[int, BandwidthCurve]]] = {}
    for entry in profile.links if profile else ():
        if entry.link == link:
            fit = LogFit(quadratic=entry.quadratic, linear=entry.linear, constant=entry.constant)
            curve = BandwidthCurve(max_bytes_per_s=entry.max_bytes_per_s, fit=fit)
            found.setdefault(entry.gpu_kind, []).append((entry.gpus_sharing, curve))
    return {kind: as_curves(pairs) for kind, pairs in found.items()}


def _curves(node: Node, by_kind: Mapping[str, Curves]) -> Curves:
    """Those of its GPUs, if they are the same for all of them."""
    first, *others = {by_kind.get(kind, ()) for kind in node.gpu_kinds}
    return () if others else first


# Routes between ranks: their links, and the bandwidth of the narrowest one.
#
# Links are named with a direction (`node/nic0:out`), because they carry both ways at once: two
# transfers contend where they share a link in the same direction.


Attachment = tuple[str, str | None]
"""Region and switch of a node."""


@dataclass(frozen=True, kw_only=True)
class DirectedLink:
    """One direction of one link."""

    name: str
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True)
class Route:
    """Links in the order of travel; none at all from a rank to itself."""

    links: tuple[DirectedLink, ...]

    @cached_property
    def bytes_per_s(self) -> float:
        """Bandwidth of the narrowest link."""
        return min((link.bytes_per_s for link in self.links), default=float("inf"))

    @cached_property
    def latency_s(self) -> float:
        """Latency of all links together."""
        return sum(link.latency_s for link in self.links)


class Routes:
    """Routes between all ranks. What lies between two switches is found once and kept.

    A route is put together in O(its length); the memory is O(pairs of attachment points in use +
    ranks).
    """

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self._between: dict[tuple[Attachment, Attachment], tuple[DirectedLink, ...]] = {}
        self._out: dict[tuple[int, str], tuple[DirectedLink, DirectedLink]] = {}
        import networkx as nx

        self._regions = nx.Graph()
        self._regions.add_nodes_from(sorted(spec.regions))
        for link in sorted(spec.region_links, key=lambda link: sorted(link.regions)):
            self._regions.add_edge(*link.regions, link=link, latency_s=link.latency_s)

    def route(self, source: int, target: int) -> Route:
        """The way from one rank to another."""
        if source == target:
            return Route(links=())
        first, second = self.spec.node_of(source), self.spec.node_of(target)
        if first == second:
            return Route(links=self._inside(first, source, target))
        return Route(
            links=(
                *self._way_out(first, source),
                *self.between_nodes(first, second),
                *self._way_in(second, target),
            )
        )

    def between_nodes(self, first: int, second: int) -> tuple[DirectedLink, ...]:
        """Links from one node's NICs to another's, both left out."""
        source, target = self.spec.nodes[first], self.spec.nodes[second]
        key = ((source.region, source.switch), (target.region, target.switch))
        if key not in self._between:
            self._between[key] = self._find(source, target)
        return self._between[key]

    def _inside(self, index: int, source: int, target: int) -> tuple[DirectedLink, ...]:
        node = self.spec.nodes[index]
        first, second = (rank - self.spec.first_ranks[index] for rank in (source, target))
        rate, latency_s = node.peer_bytes_per_s, node.link.latency_s
        if node.link.type == "nvlink":
            low, high = sorted((first, second))
            way = "up" if first < second else "down"
            name = f"{node.name}/gpu{low}-gpu{high}:{way}"
            return (DirectedLink(name=name, bytes_per_s=rate, latency_s=latency_s),)
        if node.link.type == "pcie":
            # Through the host two GPUs may get less than their PCIe links carry.
            name = f"{node.name}/gpu{first}>gpu{second}"
            between = DirectedLink(name=name, bytes_per_s=rate, latency_s=latency_s)
            return (self._plug(node, first, "out"), between, self._plug(node, second, "in"))
        return tuple(
            DirectedLink(name=f"{node.name}/gpu{end}", bytes_per_s=rate, latency_s=latency_s / 2)
            for end in (f"{first}-fabric:out", f"{second}-fabric:in")
        )

    def _plug(self, node: MeasuredNode, local: int, direction: str) -> DirectedLink:
        """A GPU's PCIe link; direction "in" is towards the GPU."""
        name = f"{node.name}/gpu{local}-pcie:{direction}"
        return DirectedLink(name=name, bytes_per_s=node.host_link_bytes_per_s, latency_s=0.0)

    def _way_out(
        self, index: int, rank: int, direction: str = "out"
    ) -> tuple[DirectedLink, DirectedLink]:
        found = self._out.get((rank, direction))
        if found is None:
            node = self.spec.nodes[index]
            local = rank - self.spec.first_ranks[index]
            nic = DirectedLink(
                name=f"{node.name}/nic{node.port_of(local)}:{direction}",
                bytes_per_s=node.port_bytes_per_s,
                latency_s=node.nic_to_switch_latency_s,
            )
            found = self._out[rank, direction] = self._plug(node, local, direction), nic
        return found

    def _way_in(self, index: int, rank: int) -> tuple[DirectedLink, DirectedLink]:
        plug, nic = self._way_out(index, rank, "in")
        return nic, plug

    def _find(self, source: MeasuredNode, target: MeasuredNode) -> tuple[DirectedLink, ...]:
        up, down = (self.spec.switches_above(node.switch) for node in (source, target))
        # In one region both climb to the first switch that they have in common, or to the core.
        common = set(up) & set(down)
        climb = (self._uplink(switch, "out") for switch in up if switch not in common)
        descent = (self._uplink(switch, "in") for switch in reversed(down) if switch not in common)
        return (*climb, *self._between_regions(source.region, target.region), *descent)

    def _uplink(self, switch: Switch, direction: str) -> DirectedLink:
        return DirectedLink(
            name=f"{switch.name}/uplink:{direction}",
            bytes_per_s=self.spec.uplink_bytes_per_s[switch.name],
            latency_s=switch.uplink_latency_s,
        )

    def _between_regions(self, source: str, target: str) -> list[DirectedLink]:
        import networkx as nx

        path = nx.dijkstra_path(self._regions, source, target, weight="latency_s")
        links = []
        for first, second in pairwise(path):
            link = self._regions.edges[first, second]["link"]
            name = f"{region_link_name(link.regions)}:{first}>{second}"
            links.append(
                DirectedLink(
                    name=name, bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s
                )
            )
        return links
