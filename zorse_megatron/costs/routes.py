"""Routes between ranks: their links, and the bandwidth of the narrowest one.

Links are named with a direction (`node/nic0:out`), because they carry both ways at once: two
transfers contend where they share a link in the same direction.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from zorse_megatron.costs.topology import MeasuredNode, Topology, region_link_name
from zorse_megatron.inputs.cluster import Switch

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

    A route is put together in O(its length); the memory is O(pairs of attachment points in use).
    """

    def __init__(self, spec: Topology) -> None:
        self.spec = spec
        self._between: dict[tuple[Attachment, Attachment], tuple[DirectedLink, ...]] = {}
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
        node = self.spec.nodes[index]
        local = rank - self.spec.first_ranks[index]
        nic = DirectedLink(
            name=f"{node.name}/nic{node.port_of(local)}:{direction}",
            bytes_per_s=node.port_bytes_per_s,
            latency_s=node.nic_to_switch_latency_s,
        )
        return self._plug(node, local, direction), nic

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
