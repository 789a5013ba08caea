"""The cluster as a networkx graph whose edges are links that are shared.

Vertices are pairs (kind, key):

    ("gpu", rank)            a GPU
    ("fabric", node)         the switch between the GPUs of a node (NVSwitch), if it has one
    ("node", node)           the host side of a node: what its GPUs and its NICs are plugged into
    ("nic", (node, number))  a NIC, or the bundle of NICs of one GPU
    ("switch", name)         a switch between nodes
    ("region", name)         the core of a region

Edges have `capacity_bytes_per_s` (each way), `latency_s` and `name`. Because all GPUs of a node
reach other nodes through its NICs, a cut between nodes costs what the NICs carry, whatever the
number of GPUs; on the complete graph of GPUs the same cut would count one link per pair.
"""

from itertools import combinations
from typing import Any

import networkx as nx

from zorse_megatron.topology.cluster_topology import MeasuredNode, Topology

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


def full_graph(spec: Topology) -> nx.Graph:
    """Everything down to single GPUs. O(GPUs + NICs); with meshes, O(pairs in a node)."""
    graph = _core_graph(spec)
    for index, node in enumerate(spec.nodes):
        graph.update(inner_graph(spec, index))
        for number in range(node.num_ports):
            nic = ("nic", (index, number))
            name, rate = f"{node.name}/nic{number}", node.port_bytes_per_s
            # The NIC is one device: what it can carry limits both sides of it.
            graph.add_edge(host(index), nic, **_edge(rate, 0.0, f"{name}-pcie"))
            graph.add_edge(nic, attachment(node), **_edge(rate, node.nic_to_switch_latency_s, name))
    return graph


def node_graph(spec: Topology) -> nx.Graph:
    """The same with each node, its GPUs and its NICs as one vertex. O(nodes + switches)."""
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


def inner_graph(spec: Topology, node: int) -> nx.Graph:
    """The GPUs of one node, what is between them, and its host side."""
    graph = nx.Graph()
    for local, rank in enumerate(spec.ranks_of(node)):
        _add_gpu(graph, spec, node, local, rank)
    if spec.nodes[node].link.type == "nvlink":
        _add_mesh(graph, spec, node)
    return graph


def _add_gpu(graph: nx.Graph, spec: Topology, index: int, local: int, rank: int) -> None:
    node = spec.nodes[index]
    name = f"{node.name}/gpu{local}"
    graph.add_edge(gpu(rank), host(index), **_edge(node.host_link_bytes_per_s, 0.0, f"{name}-pcie"))
    if node.link.type == "nvswitch" and node.num_gpus > 1:
        rate, half_s = node.peer_bytes_per_s, node.link.latency_s / 2
        graph.add_edge(gpu(rank), ("fabric", index), **_edge(rate, half_s, f"{name}-fabric"))


def _add_mesh(graph: nx.Graph, spec: Topology, index: int) -> None:
    node = spec.nodes[index]
    first = spec.first_ranks[index]
    for i, j in combinations(range(node.num_gpus), 2):
        name = f"{node.name}/gpu{i}-gpu{j}"
        rate, latency_s = node.peer_bytes_per_s, node.link.latency_s
        graph.add_edge(gpu(first + i), gpu(first + j), **_edge(rate, latency_s, name))


def _core_graph(spec: Topology) -> nx.Graph:
    """Switches with nodes below them, and regions."""
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
