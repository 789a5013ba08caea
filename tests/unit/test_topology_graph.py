"""The graph of a cluster: what it contains, and what cuts and flows cost."""

import networkx as nx
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.topologies import GB_PER_S, node, switch, topologies, two_regions
from zorse_megatron.costs.topology import CAPACITY, Topology, full_graph, gpu, host, node_graph


def least_cut(graph: nx.Graph, first: list[object], second: list[object]) -> float:
    """Cheapest cut between two sets of vertices, by maximum flow."""
    graph = graph.copy()
    graph.add_edges_from(("source", vertex) for vertex in first)  # no capacity: infinite
    graph.add_edges_from((vertex, "sink") for vertex in second)
    return float(nx.minimum_cut_value(graph, "source", "sink", capacity=CAPACITY))


def gpus(spec: Topology, index: int) -> list[object]:
    return [gpu(rank) for rank in spec.ranks_of(index)]


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_a_shared_nic_is_cut_once(num_gpus: int) -> None:
    spec = Topology.of(nodes=(node("a", num_gpus), node("b", num_gpus)))
    assert least_cut(full_graph(spec), gpus(spec, 0), gpus(spec, 1)) == 10 * GB_PER_S


def test_several_nics_add_up() -> None:
    spec = Topology.of(nodes=(node("a", num_nics=4), node("b", num_nics=3)))
    assert least_cut(full_graph(spec), gpus(spec, 0), gpus(spec, 1)) == 30 * GB_PER_S


@pytest.mark.parametrize(
    ("kind", "cost"), [("nvswitch", 96), ("nvlink", 3 * 80 + 16), ("pcie", 16)]
)
def test_what_it_costs_to_cut_off_one_gpu(kind: str, cost: float) -> None:
    spec = Topology.of(nodes=(node("a", link_type=kind),))
    ranks = gpus(spec, 0)
    assert least_cut(full_graph(spec), ranks[:1], ranks[1:]) == cost * GB_PER_S


def test_an_uplink_without_a_rate_carries_all_below() -> None:
    switches = (switch("leaf", uplink_to="spine"), switch("spine"))
    nodes = (node("a", switch="leaf"), node("b", switch="leaf", num_nics=2), node("c"))
    spec = Topology.of(nodes=nodes, switches=(*switches, switch("unused")))
    assert spec.uplink_bytes_per_s == {"leaf": 30 * GB_PER_S, "spine": 30 * GB_PER_S}
    assert ("switch", "unused") not in full_graph(spec)


def test_two_regions_as_drawn() -> None:
    spec = two_regions()
    graph = full_graph(spec)
    kinds = {kind: sum(vertex[0] == kind for vertex in graph) for kind, _ in graph}
    assert kinds == {"region": 2, "switch": 3, "node": 6, "nic": 6, "fabric": 6, "gpu": 24}
    west = [vertex for index in range(4) for vertex in gpus(spec, index)]
    east = [vertex for index in (4, 5) for vertex in gpus(spec, index)]
    assert least_cut(graph, west, east) == GB_PER_S
    leaf0 = [vertex for index in (0, 1) for vertex in gpus(spec, index)]
    assert least_cut(graph, leaf0, gpus(spec, 2)) == 10 * GB_PER_S  # the NIC of w2
    assert least_cut(graph, leaf0, gpus(spec, 2) + gpus(spec, 3)) == 12 * GB_PER_S


@settings(max_examples=examples(60))
@given(topologies())
def test_nodes_as_vertices_keep_the_capacities_between_nodes(spec: Topology) -> None:
    if len(spec.nodes) < 2:
        return
    full, small = full_graph(spec), node_graph(spec)
    assert nx.is_connected(full) and nx.is_connected(small)
    for other in range(1, len(spec.nodes)):
        expected = least_cut(full, gpus(spec, 0), gpus(spec, other))
        assert least_cut(small, [host(0)], [host(other)]) == pytest.approx(expected)


def test_ranks_and_ports() -> None:
    spec = Topology.of(nodes=(node("a", 3), node("b", 5)))
    assert [spec.node_of(rank) for rank in range(8)] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert list(spec.ranks_of(1)) == [3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="rank 8"):
        spec.node_of(8)
    few, many = node("a", 4, num_nics=2), node("b", 2, num_nics=8)
    assert [few.port_of(local) for local in range(4)] == [0, 0, 1, 1]
    assert [many.port_of(local) for local in range(2)] == [0, 1]
    assert many.port_bytes_per_s == 40 * GB_PER_S  # four NICs for each GPU
