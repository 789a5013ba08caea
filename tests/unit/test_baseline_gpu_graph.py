"""The paper's SPLIT on the complete graph of GPUs, against the algorithm written out."""

from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import given, settings

from tests.examples import examples
from tests.topologies import GB_PER_S, node, topologies
from zorse_megatron.costs.topology import Routes, Topology
from zorse_megatron.planner.baselines.published_planners import (
    pair_bytes_per_s,
    paper_groupings,
)


def complete_graph(spec: Topology) -> nx.Graph:
    routes, graph = Routes(spec), nx.Graph()
    graph.add_nodes_from(range(spec.num_gpus))
    for first, second in combinations(range(spec.num_gpus), 2):
        graph.add_edge(first, second, weight=pair_bytes_per_s(routes, first, second))
    return graph


@settings(max_examples=examples(60))
@given(topologies(max_nodes=5, max_gpus=12))
def test_every_step_takes_the_cheapest_cut_of_all_groups(spec: Topology) -> None:
    """As the authors' code does it: Stoer-Wagner on every component, the lightest cut wins."""
    graph = complete_graph(spec)
    steps = list(paper_groupings(spec, spec.num_gpus))
    assert len(steps) == spec.num_gpus
    for before, after in pairwise(steps):
        expected = min(
            nx.stoer_wagner(graph.subgraph(group))[0] for group in before.grouping if len(group) > 1
        )
        assert after.cut_bytes_per_s - before.cut_bytes_per_s == pytest.approx(expected)
        gone, new = set(before.grouping) - set(after.grouping), after.grouping
        (first, second) = set(new) - set(before.grouping)
        assert sorted(first + second) == list(*gone)
        assert nx.cut_size(graph, first, second, weight="weight") == pytest.approx(expected)


def test_single_gpus_are_peeled_off_slow_nodes() -> None:
    """What the complete graph does to nodes without a fast switch, and the topology does not."""
    slow = {"link_type": "pcie", "link_bytes_per_s": 6 * GB_PER_S}
    spec = Topology.of(nodes=tuple(node(f"n{i}", 8, **slow) for i in range(3)))
    groupings = [step.grouping for step in paper_groupings(spec)]
    assert [sorted(map(len, grouping)) for grouping in groupings] == [[24], [1, 23], [1, 1, 22]]


def test_the_default_is_one_group_per_node_at_most() -> None:
    spec = Topology.of(nodes=(node("a", 2), node("b", 4)))
    assert [len(step.grouping) for step in paper_groupings(spec)] == [1, 2]
