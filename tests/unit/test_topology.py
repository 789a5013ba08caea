"""The topology of a cluster: its graph, routes, link curves, and where they come from."""

import csv
import json
import math
from itertools import pairwise
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.topologies import (
    GB_PER_S,
    full_graph,
    many_nodes,
    node,
    switch,
    topologies,
    two_regions,
)
from tests.unit.in_process import run_program
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.link_bandwidth import BandwidthCurve, LogFit, as_curves, curve_for
from zorse_megatron.costs.topology import (
    CAPACITY,
    Routes,
    Topology,
    gpu,
    host,
    node_graph,
    topology_of,
)
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.profile import LinkCurve, Profile, Source

# The graph.


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


# Routes.


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


# Curves.

MEASURED = Path(__file__).resolve().parents[3] / "shared" / "measured" / "link_bandwidth.csv"
SIZES = [2**power for power in range(0, 36)]


def measured_rows() -> list[dict[str, str]]:
    if not MEASURED.is_file():
        pytest.skip("the measured link curves are not here (../shared/measured)")
    with MEASURED.open() as file:
        return list(csv.DictReader(file))


def curve_of(row: dict[str, str]) -> BandwidthCurve:
    a, b, c = (float(row[column]) for column in "abc")
    fit = LogFit(quadratic=a, linear=b, constant=c)
    return BandwidthCurve(max_bytes_per_s=float(row["max_bytes_per_s"]), fit=fit)


def test_measured_curves_are_met_where_messages_are_large() -> None:
    for row in measured_rows():
        curve = curve_of(row)
        a, b, c = (float(row[column]) for column in "abc")
        for megabytes in (2, 4, 8, 16):
            x = math.log2(megabytes)
            rate = min(1e9 * (a * x * x + b * x + c), float(row["max_bytes_per_s"]))
            assert curve.bytes_per_s(megabytes * 1e6) == pytest.approx(rate), row


def test_measured_curves_give_latencies_that_are_possible() -> None:
    # The fits know nothing below some hundred kilobytes, and taken literally turn negative there.
    for row in measured_rows():
        latency_s = curve_of(row).transfer_s(0)
        # 13 us for NVLink with all GPUs, 150 us for the slowest cloud network.
        assert 5e-6 < latency_s < 2e-4, row


def test_measured_curves_keep_their_order_by_sharing() -> None:
    rows = [row for row in measured_rows() if row["link"] == "inter-node"]
    pairs = [(int(row["gpus_sharing"]), curve_of(row)) for row in rows if row["gpu"] == "GH-96"]
    curves = as_curves(pairs)
    rates = [curve_for(curves, sharing).bytes_per_s(64e6) for sharing in (1, 2, 3, 4, 9)]
    assert rates[1] == rates[2] and rates[3] == rates[4]  # the next lower number, the highest
    assert rates[0] < rates[1] < rates[3]


coefficients = st.floats(-50, 50).map(lambda value: round(value, 3))


@given(coefficients, coefficients, coefficients, st.floats(1e6, 1e12))
def test_larger_messages_take_longer_and_go_faster(
    a: float, b: float, c: float, cap: float
) -> None:
    try:
        fit = LogFit(quadratic=a, linear=b, constant=c)
    except ValueError:
        assume(False)
    curve = BandwidthCurve(max_bytes_per_s=cap, fit=fit)
    times = [curve.transfer_s(size) for size in SIZES]
    rates = [curve.bytes_per_s(size) for size in SIZES]
    slack = 1 + 1e-9
    assert all(0 < first <= second * slack for first, second in pairwise(times))
    assert all(0 < first <= second * slack for first, second in pairwise(rates))
    assert max(rates) <= cap * slack
    assert curve.transfer_s(0) <= times[0] * slack


@given(coefficients, coefficients, coefficients)
def test_the_least_time_is_found(a: float, b: float, c: float) -> None:
    """Below `flat_below_bytes` the raw time would grow again; brute force over a fine grid."""
    try:
        fit = LogFit(quadratic=a, linear=b, constant=c)
    except ValueError:
        assume(False)
    assume(fit.flat_below_bytes > 0)
    start = math.log2(fit.flat_below_bytes / 1e6)
    end = -b / (2 * a) if a < 0 else max(start, 0) + 20
    grid = [start + (end - start) * i / 400 for i in range(401)]
    times = [2**x / (a * x * x + b * x + c) for x in grid if -150 < x < 150]
    assert all(first <= second * (1 + 1e-9) for first, second in pairwise(times))


def test_constant_link() -> None:
    curve = BandwidthCurve(max_bytes_per_s=1e9, latency_s=1e-3)
    assert curve.transfer_s(1e6) == pytest.approx(2e-3)
    assert curve.bytes_per_s(1e6) == pytest.approx(5e8)
    assert curve.transfer_s(0) == 1e-3 and curve.bytes_per_s(0) == 1e9


@pytest.mark.parametrize(
    "coefficients",
    [(0, 0, 0), (0, 0, -1), (0, -1, 5), (-1, 0, -1), (math.nan, 0, 1), (0, math.inf, 1)],
)
def test_useless_fits_are_refused(coefficients: tuple[float, float, float]) -> None:
    a, b, c = coefficients
    with pytest.raises(ValueError, match="expected"):
        LogFit(quadratic=a, linear=b, constant=c)


def test_useless_links_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth > 0"):
        BandwidthCurve(max_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="latency >= 0"):
        BandwidthCurve(max_bytes_per_s=1.0, latency_s=-1.0)


# From files.

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = b"""
nodes:
  - {name: big, gpus: 8 x A100-40, nics: 4 x 100 Gb/s, switch: leaf}
  - {name: odd, gpus: [2 x V100-16, 1 x T4], link: PCIe 10 GB/s, nics: 25 Gb/s, switch: leaf}
  - {name: far, gpus: 4 x V100-16, nics: 10 Gb/s, switch: spine}
switches:
  - {name: spine}
  - {name: leaf, uplink: {to: spine, bandwidth: 200 Gb/s, latency: 2 us}}
"""


def odd_cluster() -> Cluster:
    return parse_cluster(TEXT)


def test_nodes_and_switches() -> None:
    spec = topology_of(odd_cluster())
    big, odd, far = spec.nodes
    assert (big.num_gpus, odd.num_gpus, far.num_gpus) == (8, 3, 4)
    assert odd.gpu_kinds == ("V100-16", "V100-16", "T4")
    assert [node.link.type for node in spec.nodes] == ["nvswitch", "pcie", "nvlink"]
    assert big.nics_bytes_per_s == 50e9 and big.num_ports == 4
    assert spec.uplink_bytes_per_s["leaf"] == 25e9
    assert spec.switch_named["leaf"].uplink_latency_s == pytest.approx(2e-6)
    assert spec.num_gpus == odd_cluster().world_size
    for rank in range(spec.num_gpus):
        node = spec.node_with(rank)
        assert node.name == odd_cluster().node_of_rank(rank).name


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_all_examples_have_prices(name: str) -> None:
    loaded = load_cluster(EXAMPLES / name)
    spec = topology_of(loaded)
    assert spec.num_gpus == loaded.world_size
    comm = GraphComm(spec)
    ranks = tuple(range(spec.num_gpus))
    assert comm.all_gather_s(ranks, (10**6,) * len(ranks)) > 0
    assert comm.transfer_s(0, ranks[-1], 10**6) > 0


def test_curves_of_a_profile_replace_rates() -> None:
    rows = [("inter-node", 1, 2.0), ("inter-node", 4, 6.0), ("intra-node", 2, 200.0)]
    links = tuple(
        LinkCurve(
            link=link,  # type: ignore[arg-type]
            gpu_kind="V100-16",
            gpus_sharing=sharing,
            quadratic=0.0,
            linear=0.0,
            constant=rate,
            max_bytes_per_s=rate * 1e9,
            source="here",
        )
        for link, sharing, rate in rows
    )
    source = Source(name="here", kind="measured")
    profile = Profile(schema_version=1, sources=(source,), links=links)
    big, odd, far = topology_of(odd_cluster(), profile).nodes
    assert not big.nic_curves and not odd.nic_curves  # another kind; several kinds
    assert [sharing for sharing, _ in far.nic_curves] == [1, 4]
    assert far.nics_bytes_per_s == 6e9 and far.peer_bytes_per_s == 200e9


def test_a_lone_node_needs_no_nics() -> None:
    spec = topology_of(parse_cluster(b"nodes: [{name: only, gpus: 4 x T4}]"))
    assert GraphComm(spec).all_gather_s((0, 1, 2, 3), (10**6,) * 4) > 0


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_prints_json() -> None:
    ended = run_program(ROOT / "scripts/bench_topology.py", "--gpus", "8", "16", "--json")
    assert ended.status == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert [row["gpus"] for row in rows] == [8, 16]
    assert all(value >= 0 for row in rows for value in row.values())
    assert "candidates_1000_s" in rows[0]
