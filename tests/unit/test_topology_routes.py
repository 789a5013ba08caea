"""Routes against the graph."""

import networkx as nx
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.topologies import GB_PER_S, many_nodes, node, topologies, two_regions
from zorse_megatron.costs.routes import Routes
from zorse_megatron.costs.topology import CAPACITY, Topology, full_graph, gpu


def walk(spec: Topology, source: int, target: int) -> list[object]:
    """Vertices that a route passes, found by the names of its links. Checks rates on the way."""
    graph = full_graph(spec)
    by_name = {
        data["name"]: (first, second, data) for first, second, data in graph.edges(data=True)
    }
    at, passed = gpu(source), [gpu(source)]
    for link in Routes(spec).route(source, target).links:
        name = link.name.rsplit(":", 1)[0]
        if ">" in name:  # what two GPUs get through the host is no edge
            continue
        first, second, data = by_name[name]
        if at not in (first, second):  # a NIC has two edges; the inner one is not named in routes
            first, second, _ = by_name[f"{name}-pcie"]
            at = second if at == first else first
            first, second, data = by_name[name]
        assert at in (first, second)
        at = second if at == first else first
        if at[0] == "nic":
            inner = by_name[f"{name}-pcie"]
            at = inner[1] if inner[0] == at else inner[0]
        assert link.bytes_per_s == pytest.approx(data[CAPACITY])
        passed.append(at)
    assert at == gpu(target)
    return passed


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(topologies())
def test_routes_are_walks_in_the_graph(spec: Topology) -> None:
    routes = Routes(spec)
    rates: dict[str, float] = {}
    for source in range(spec.num_gpus):
        for target in range(spec.num_gpus):
            passed = walk(spec, source, target)
            assert len(set(passed)) == len(passed)  # no vertex twice
            route = routes.route(source, target)
            back = routes.route(target, source)
            assert route.bytes_per_s == back.bytes_per_s
            assert route.latency_s == pytest.approx(back.latency_s)
            there = {link.name for link in route.links}
            assert not there & {link.name for link in back.links}  # full duplex
            for link in route.links:
                assert rates.setdefault(link.name, link.bytes_per_s) == link.bytes_per_s


@settings(max_examples=examples(30))
@given(topologies())
def test_ways_between_nodes_are_shortest(spec: Topology) -> None:
    """Only nodes and what is between them: there the shortest way by latency is the one taken."""
    routes = Routes(spec)
    graph = full_graph(spec)
    for source in range(spec.num_gpus):
        for target in range(spec.num_gpus):
            if spec.node_of(source) != spec.node_of(target):
                expected = nx.dijkstra_path_length(graph, gpu(source), gpu(target), "latency_s")
                assert routes.route(source, target).latency_s == pytest.approx(expected)


def test_names_of_a_long_way() -> None:
    names = [link.name for link in Routes(two_regions()).route(1, 23).links]
    assert names == [
        "w0/gpu1-pcie:out",
        "w0/nic0:out",
        "leaf0/uplink:out",
        "spine/uplink:out",
        "east--west:west>east",
        "e1/nic0:in",
        "e1/gpu3-pcie:in",
    ]


def test_ways_stay_below_the_first_common_switch() -> None:
    routes = Routes(two_regions())
    assert not routes.between_nodes(0, 1)
    names = [link.name for link in routes.between_nodes(1, 2)]
    assert names == ["leaf0/uplink:out", "leaf1/uplink:in"]


def test_gpus_of_a_node_share_its_nic_and_nothing_else() -> None:
    spec = Topology.of(nodes=(node("a"), node("b")))
    routes = Routes(spec)
    shared = {link.name for link in routes.route(0, 4).links} & {
        link.name for link in routes.route(1, 5).links
    }
    assert shared == {"a/nic0:out", "b/nic0:in"}


@pytest.mark.parametrize("kind", ["nvswitch", "nvlink", "pcie"])
def test_inside_a_node(kind: str) -> None:
    rate = 8 * GB_PER_S
    spec = Topology.of(nodes=(node("a", link_type=kind, link_bytes_per_s=rate),))
    route = Routes(spec).route(0, 2)
    assert route.bytes_per_s == rate
    assert route.latency_s == pytest.approx(4e-6)
    assert Routes(spec).route(1, 1).links == ()


def test_memory_is_that_of_pairs_of_switches() -> None:
    spec = many_nodes(1250)
    routes = Routes(spec)
    for source in range(0, 10_000, 97):
        for target in range(0, 10_000, 1013):
            routes.route(source, target)
    assert len(routes._between) <= 79 * 79
