"""Cuts of the topology graph against brute force."""

from itertools import combinations, pairwise, product
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.topologies import GB_PER_S, many_nodes, node, region_link, topologies, two_regions
from tests.unit.test_topology_graph import least_cut
from zorse_megatron.costs.topology import (
    CAPACITY,
    Topology,
    Vertex,
    full_graph,
    gpu,
    inner_graph,
    node_graph,
    topology_of,
)
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.planner.groupings.graph_cuts import cheapest_cut, reduce_graph, split_groupings
from zorse_megatron.planner.groupings.pools import Grouping

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def crossing(graph: nx.Graph, side: set[Vertex]) -> float:
    return float(nx.cut_size(graph, side, weight=CAPACITY))


def brute_force_bipartition(graph: nx.Graph, terminals: list[Vertex]) -> float:
    """Cheapest cut over all ways to deal the terminals to two sides."""
    first, *rest = terminals
    return min(
        least_cut(graph, [first, *(v for v in rest if v not in away)], list(away))
        for size in range(1, len(rest) + 1)
        for away in combinations(rest, size)
    )


@settings(max_examples=examples(40))
@given(topologies(max_gpus=6))
def test_the_first_cut_is_the_cheapest(spec: Topology) -> None:
    steps = list(split_groupings(spec, 2))
    if spec.num_gpus == 1:
        assert [step.grouping for step in steps] == [((0,),)]
        return
    graph, (first, second) = full_graph(spec), steps[1].grouping
    expected = brute_force_bipartition(graph, [gpu(rank) for rank in range(spec.num_gpus)])
    assert steps[1].cut_bytes_per_s == pytest.approx(expected)
    # The two groups that are returned are those that this cut parts.
    found = least_cut(graph, [gpu(rank) for rank in first], [gpu(rank) for rank in second])
    assert found == pytest.approx(expected)


def brute_force_k_cut(graph: nx.Graph, gpus: list[Vertex], k: int) -> float:
    """Cheapest way to give every vertex one of k labels so that GPUs have all of them."""
    order = [*gpus, *(vertex for vertex in graph if vertex not in gpus)]
    best = float("inf")
    for labels in product(range(k), repeat=len(order)):
        if len(set(labels[: len(gpus)])) == k:
            label = dict(zip(order, labels, strict=True))
            cut = sum(
                capacity for u, v, capacity in graph.edges(data=CAPACITY) if label[u] != label[v]
            )
            best = min(best, cut)
    return best


@settings(max_examples=examples(25))
@given(topologies(max_nodes=3, max_gpus=4))
def test_split_keeps_its_promise(spec: Topology) -> None:
    """At most 2 - 2/k times the cheapest k-cut (Saran and Vazirani)."""
    graph = node_graph(spec)
    for index in range(len(spec.nodes)):
        graph.update(inner_graph(spec, index))
    gpus = [gpu(rank) for rank in range(spec.num_gpus)]
    reduce_graph(graph, set(gpus), list(graph))
    for step in split_groupings(spec, 4):
        k = len(step.grouping)
        if k > 1:
            best = brute_force_k_cut(graph, gpus, k)
            assert best * (1 - 1e-9) <= step.cut_bytes_per_s <= (2 - 2 / k) * best * (1 + 1e-9)


@settings(max_examples=examples(60))
@given(topologies())
def test_every_step_splits_one_group(spec: Topology) -> None:
    steps = list(split_groupings(spec, 20))
    assert [len(step.grouping) for step in steps] == list(range(1, spec.num_gpus + 1))
    for before, after in pairwise(steps):
        gone = set(before.grouping) - set(after.grouping)
        new = set(after.grouping) - set(before.grouping)
        assert len(gone) == 1 and len(new) == 2
        assert sorted(sum(new, ())) == list(*gone)
        assert after.cut_bytes_per_s > before.cut_bytes_per_s


def whole_nodes(spec: Topology, grouping: Grouping) -> bool:
    group_of = {rank: number for number, group in enumerate(grouping) for rank in group}
    return all(
        len({group_of[rank] for rank in spec.ranks_of(index)}) == 1
        for index in range(len(spec.nodes))
    )


@pytest.mark.parametrize("letter", "abc")
def test_clusters_of_the_paper_fall_apart_along_nodes(letter: str) -> None:
    spec = topology_of(load_cluster(EXAMPLES / f"zorse-paper-cluster-{letter}.yaml"))
    steps = list(split_groupings(spec, len(spec.nodes)))
    assert len(steps) == len(spec.nodes)
    assert all(whole_nodes(spec, step.grouping) for step in steps)


def test_narrow_links_go_first() -> None:
    spec = two_regions()
    west, east, nodes = (
        tuple(range(16)),
        tuple(range(16, 24)),
        [list(spec.ranks_of(i)) for i in range(6)],
    )
    groupings = [step.grouping for step in split_groupings(spec, 8)]
    assert groupings[1] == (west, east)
    assert groupings[5] == tuple(map(tuple, nodes))
    assert len(groupings[6]) == 7 and not whole_nodes(spec, groupings[6])


def test_ten_thousand_gpus() -> None:
    spec = many_nodes(1250)
    *_, last = split_groupings(spec, 16)
    assert len(last.grouping) == 16 and whole_nodes(spec, last.grouping)
    assert sorted(sum(last.grouping, ())) == list(range(10_000))


def test_a_region_without_gpus_is_not_a_group() -> None:
    """Stoer-Wagner would cut the hub off: three thin links cost less than any other cut."""
    names = ("a", "b", "c")
    far = [(x, y) for x, y in combinations(names, 2)]
    links = [region_link(pair, 20 * GB_PER_S, 0.1) for pair in far]
    links += [region_link((name, "hub"), GB_PER_S, 0.01) for name in names]
    wide = 100 * GB_PER_S
    nodes = tuple(
        node(name, 2, region=name, nic_bytes_per_s=wide, host_link_bytes_per_s=wide)
        for name in names
    )
    spec = Topology.of(nodes=nodes, region_links=tuple(links))
    _, second = split_groupings(spec, 2)
    # Two links of 20 and one of 1; the hub stays with the others.
    assert second.cut_bytes_per_s == 41 * GB_PER_S
    assert second.grouping in [
        ((0, 1), (2, 3, 4, 5)),
        ((0, 1, 2, 3), (4, 5)),
        ((0, 1, 4, 5), (2, 3)),
    ]


def test_reduction_and_cut_of_a_chain() -> None:
    graph = nx.Graph()
    capacities = [5.0, 2.0, 7.0, 4.0]
    for index, capacity in enumerate(capacities):
        graph.add_edge(("gpu", index), ("gpu", index + 1), **{CAPACITY: capacity})
    terminals = {("gpu", 0), ("gpu", 4)}
    reduce_graph(graph, terminals, list(graph))
    assert list(graph.edges(data=CAPACITY)) == [(("gpu", 0), ("gpu", 4), 2.0)]
    cut = cheapest_cut(graph, terminals)
    assert cut is not None and cut.capacity == 2.0
    assert crossing(graph, set(cut.side)) == 2.0
    assert cheapest_cut(graph, {("gpu", 0)}) is None
