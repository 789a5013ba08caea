"""Candidates for groups: cuts, proposals, neighbours and names, against brute force."""

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import accumulate, combinations, islice, pairwise, permutations, product
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.topologies import (
    GB_PER_S,
    full_graph,
    many_nodes,
    node,
    region_link,
    switch,
    topologies,
    two_regions,
)
from tests.unit.test_planner_search import lab
from tests.unit.test_topology import least_cut
from zorse_megatron.costs.topology import (
    CAPACITY,
    Routes,
    Topology,
    Vertex,
    gpu,
    inner_graph,
    node_graph,
    topology_of,
)
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.planner.baselines.published_planners import (
    pair_bytes_per_s,
    paper_groupings,
)
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.groupings.graph_cuts import cheapest_cut, reduce_graph, split_groupings
from zorse_megatron.planner.groupings.pools import (
    Grouping,
    Pool,
    hardware_key,
    mergers_of,
    normalised,
    pools_of,
    set_partitions,
    spread,
)
from zorse_megatron.planner.groupings.proposals import neighbours, propose_groupings
from zorse_megatron.planner.groupings.symmetry import Symmetry
from zorse_megatron.planner.search.sources import PlanKeys

# Cuts.

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


# Proposals.


def symmetries(spec: Topology) -> Iterator[list[int]]:
    """All renamings of ranks under which the cluster stays the same, by trying all."""
    switches = range(len(spec.switches))
    for switch_order in permutations(switches):
        moved = {spec.switches[i].name: spec.switches[j].name for i, j in enumerate(switch_order)}
        if any(
            (a.uplink, a.region, moved.get(str(a.uplink_to))) != (b.uplink, b.region, b.uplink_to)
            for a in spec.switches
            for b in [spec.switch_named[moved[a.name]]]
        ):
            continue
        for order in permutations(range(len(spec.nodes))):
            pairs = [(spec.nodes[i], spec.nodes[j]) for i, j in enumerate(order)]
            if all(
                hardware_key(a) == hardware_key(b)
                and a.region == b.region
                and moved.get(str(a.switch)) == b.switch
                for a, b in pairs
            ):
                yield from _within_nodes(spec, order)


def _within_nodes(spec: Topology, order: tuple[int, ...]) -> Iterator[list[int]]:
    choices = [list(permutations(spec.ranks_of(target))) for target in order]
    for chosen in product(*choices):
        renamed = [rank for ranks in chosen for rank in ranks]
        kinds = [kind for each in spec.nodes for kind in each.gpu_kinds]
        if all(kinds[rank] == kinds[to] for rank, to in enumerate(renamed)):
            yield renamed


SMALL = {
    "three equal nodes": Topology.of(nodes=tuple(node(f"n{i}", 2) for i in range(3))),
    "two kinds of nodes": Topology.of(
        nodes=(node("a", 2), node("b", 2), node("c", 1, kind="B"), node("d", 1, kind="B"))
    ),
    "mixed nodes": Topology.of(
        nodes=tuple(node(f"n{i}", gpu_kinds=("A", "A", "B")) for i in range(2))
    ),
    "two leaves": Topology.of(
        nodes=tuple(node(f"n{i}", 1, switch=f"leaf{i // 2}") for i in range(5)),
        switches=tuple(switch(f"leaf{i}", uplink_bytes_per_s=1e9) for i in range(3)),
    ),
    "one leaf is wider": Topology.of(
        nodes=tuple(node(f"n{i}", 1, switch=f"leaf{i // 2}") for i in range(4)),
        switches=tuple(switch(f"leaf{i}", uplink_bytes_per_s=1e9 + i) for i in range(2)),
    ),
    "six lone GPUs": Topology.of(nodes=tuple(node(f"n{i}", 1) for i in range(6))),
}


def test_what_a_node_has_worked_out_does_not_tell_it_from_another() -> None:
    first, second = SMALL["three equal nodes"].nodes[:2]
    fresh = hardware_key(first)
    assert first.port_bytes_per_s > 0  # kept in the node from here on
    assert hardware_key(first) == fresh == hardware_key(second)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_one_signature_for_each_class_of_groupings(name: str) -> None:
    spec = SMALL[name]
    renamings = list(symmetries(spec))
    assert len(renamings) > 1
    symmetry = Symmetry(spec)
    classes: dict[Grouping, set[int]] = {}
    for partition in set_partitions(tuple(range(spec.num_gpus))):
        grouping = normalised(partition)
        smallest = min(
            normalised([renamed[rank] for rank in group] for group in grouping)
            for renamed in renamings
        )
        classes.setdefault(smallest, set()).add(symmetry.signature(grouping))
    assert all(len(signatures) == 1 for signatures in classes.values())
    assert len(set.union(*classes.values())) == len(classes)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(topologies(), st.integers(1, 8), st.integers(1, 60))
def test_candidates_are_valid_and_different(spec: Topology, max_groups: int, limit: int) -> None:
    found = list(propose_groupings(spec, max_groups=max_groups, limit=limit))
    assert 1 <= len(found) <= limit
    assert found[0].grouping == (tuple(range(spec.num_gpus)),)
    for proposal in found:
        grouping = proposal.grouping
        assert len(grouping) <= max_groups
        assert grouping == normalised(grouping) and all(grouping)
        assert sorted(sum(grouping, ())) == list(range(spec.num_gpus))
    assert len({each.grouping for each in found}) == len(found)
    symmetry = Symmetry(spec)
    assert len({symmetry.signature(each.grouping) for each in found}) == len(found)
    # A lower cap gives the beginning of the same list.
    fewer = list(propose_groupings(spec, max_groups=max_groups, limit=limit // 2))
    assert fewer == found[: limit // 2]


def test_candidates_of_cluster_b_have_what_the_planner_looks_for() -> None:
    spec = topology_of(load_cluster(EXAMPLES / "zorse-paper-cluster-b.yaml"))
    found = {each.grouping: each.origin for each in propose_groupings(spec, limit=400)}
    kinds = [8, 16, 16, 24]
    sizes = [sorted(map(len, grouping)) for grouping in found]
    assert kinds in sizes
    assert sorted([8, 4, 4, 4, 4, 8, 8, 8, 8, 8]) in sizes
    assert [64] in sizes
    # A100 and T4 together, the rest by kind; and the A100 node in two.
    assert [16, 16, 32] in sizes
    assert sorted([4, 4, 16, 16, 24]) in sizes
    families = {origin.split()[0] for origin in found.values()}
    assert families == {"together", "split", "by", "pools"}


@pytest.mark.slow
def test_the_order_does_not_depend_on_the_process() -> None:
    script = (
        "from tests.topologies import two_regions\n"
        "from zorse_megatron.planner.groupings.proposals import neighbours, propose_groupings\n"
        "found = list(propose_groupings(two_regions(), limit=150))\n"
        "found += neighbours(two_regions(), found[40].grouping)\n"
        "print(found)"
    )
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = io.StringIO()
    with redirect_stdout(here):
        exec(script, {})
    assert there == here.getvalue() and len(there) > 1000


def test_like_speeds_come_first_when_asked() -> None:
    nodes = (node("a", 4), node("b", 4, kind="B"))
    spec = Topology.of(nodes=nodes)

    def first_with_three(speeds: dict[str, float]) -> Grouping:
        found = propose_groupings(spec, speeds=speeds)
        return next(
            each.grouping for each in found if len(each.grouping) == 3 and each.origin == "pools"
        )

    assert first_with_three({"A": 2.0, "B": 1.0}) == ((0, 1), (2, 3), (4, 5, 6, 7))
    assert first_with_three({"A": 1.0, "B": 2.0}) == ((0, 1, 2, 3), (4, 5), (6, 7))


@pytest.mark.slow
def test_ten_thousand_gpus_are_proposed_for() -> None:
    spec = many_nodes(1250)
    found = list(propose_groupings(spec, limit=60, max_groups=32))
    assert len(found) == 60
    near = list(neighbours(spec, found[20].grouping, limit=20))
    assert len(near) == 20


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(topologies(), st.randoms(use_true_random=False))
def test_neighbours_are_one_step_away(spec: Topology, random: object) -> None:
    labels = [random.randint(0, 3) for _ in range(spec.num_gpus)]  # type: ignore[attr-defined]
    grouping = normalised(
        [rank for rank, label in enumerate(labels) if label == wanted] for wanted in range(4)
    )
    symmetry = Symmetry(spec)
    seen = {symmetry.signature(grouping)}
    for near in islice(neighbours(spec, grouping), 200):
        assert near.grouping == normalised(near.grouping)
        assert sorted(sum(near.grouping, ())) == list(range(spec.num_gpus))
        change = len(near.grouping) - len(grouping)
        assert change == {"merge": -1, "split": 1, "move": 0}[near.origin]
        gone = set(grouping) - set(near.grouping)
        assert len(gone) == {"merge": 2, "split": 1, "move": 2}[near.origin]
        assert symmetry.signature(near.grouping) not in seen
        seen.add(symmetry.signature(near.grouping))


def test_every_merge_and_halving_is_a_neighbour() -> None:
    spec = Topology.of(nodes=(node("a", 2), node("b", 2, kind="B"), node("c", 2, kind="C")))
    by_node = ((0, 1), (2, 3), (4, 5))
    near = {each.grouping for each in neighbours(spec, by_node)}
    assert ((0, 1, 2, 3), (4, 5)) in near
    assert ((0, 1, 4, 5), (2, 3)) in near
    assert ((0,), (1,), (2, 3), (4, 5)) in near
    assert ((0, 1, 2), (3,), (4, 5)) in near
    assert ((0,), (1, 2, 3), (4, 5)) in near or ((0, 2, 3), (1,), (4, 5)) in near
    assert ((0, 1, 2, 3, 4, 5),) not in near  # two steps


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 96))
def test_pools_divide_along_nodes(num_nodes: int, per_node: int, parts: int) -> None:
    ranks = iter(range(num_nodes * per_node))
    by_node = tuple(tuple(next(ranks) for _ in range(per_node)) for _ in range(num_nodes))
    pool = Pool(kind="A", region="r", by_node=by_node)
    if parts > pool.num_gpus:
        return
    shares = pool.divided(parts)
    assert len(shares) == parts and all(shares)
    assert sum(shares, ()) == tuple(range(pool.num_gpus))
    sizes = {len(share) for share in shares}
    unit = per_node if parts <= num_nodes else 1
    assert max(sizes) - min(sizes) <= unit
    if parts in pool.numbers_of_parts(96):
        cuts = sum(len({rank // per_node for rank in share}) for share in shares)
        assert cuts == max(parts, num_nodes)  # no share straddles an edge that it could keep


def test_pools_and_mergers() -> None:
    pools = pools_of(two_regions())
    assert [(pool.region, pool.kind, len(pool.by_node)) for pool in pools] == [
        ("west", "A", 4),
        ("east", "B", 2),
    ]
    assert len(mergers_of(pools)) == 2
    many = [Pool(kind=f"k{i}", region=f"r{i % 2}", by_node=((i,),)) for i in range(8)]
    assert [len(mergers_of(many[:n])) for n in (3, 4, 5, 6)] == [5, 15, 52, 203]  # Bell numbers
    assert len(mergers_of(many)) == 1 + 1 + 1 + 28  # apart (also by kind), all, regions, pairs
    assert spread(1) == [1] and spread(20) == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20]


def test_mixed_nodes_are_divided_by_kind() -> None:
    spec = SMALL["mixed nodes"]
    assert [pool.by_node for pool in pools_of(spec)] == [((0, 1), (3, 4)), ((2,), (5,))]
    found = {each.grouping for each in propose_groupings(spec)}
    assert ((0, 1, 3, 4), (2, 5)) in found
    assert ((0, 1), (2,), (3, 4), (5,)) in found


# Set partitions.


def bell_numbers(count: int) -> list[int]:
    row, found = [1], []
    while len(found) < count:
        found.append(row[0])
        row = list(accumulate(row, initial=row[-1]))
    return found


def test_gives_each_partition_once():
    for size, bell in enumerate(bell_numbers(8)):
        items = tuple(range(size))
        found = list(set_partitions(items))
        assert len({frozenset(map(frozenset, each)) for each in found}) == len(found) == bell
        assert all(sorted(sum(each, ())) == list(items) for each in found)


# Names of plans.

CLUSTER = """
name: lab
nodes:
  - {name: new, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 100 Gb/s}
  - {name: old, count: 3, gpus: 2 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""
# Ranks 0 and 1 are of the new node; 2 and 3, 4 and 5, 6 and 7 of the old ones.


@pytest.fixture(scope="module")
def place():
    inputs = lab(CLUSTER)
    keys, device_groups = PlanKeys(inputs, few_gpus=0), DeviceGroups(inputs)
    return lambda *groups: keys.place([device_groups.of(group) for group in groups])


def test_like_nodes_and_gpus_change_places(place):
    first = place((0, 1), (2, 3), (4, 5), (6, 7))
    for nodes in permutations([(2, 3), (4, 5), (6, 7)]):
        assert place((0, 1), *nodes) == first
    assert place((1,), (0,), (2, 3)) == place((0,), (1,), (4, 5))


def test_a_node_that_comes_twice_is_told_from_two(place):
    assert place((2,), (3,)) == place((5,), (4,)) != place((2,), (4,))
    assert place((2, 4), (3,), (5,)) == place((4, 6), (5,), (7,))
    assert place((2, 4), (3, 5)) != place((2, 4), (3, 6))


def test_order_and_sizes_of_groups_count(place):
    assert place((0, 1), (2, 3)) != place((2, 3), (0, 1))
    assert place((0, 1), (2, 3)) != place((0,), (2, 3))
    assert place((2, 3)) != place((2, 4))


def test_nodes_below_different_switches_or_with_other_hosts_are_not_alike():
    inputs = lab(CLUSTER)
    nodes = list(inputs.spec.nodes)
    nodes[2] = dataclasses.replace(nodes[2], host_memory_bytes=2**30)
    nodes[3] = dataclasses.replace(nodes[3], region="far")
    inputs = dataclasses.replace(inputs, spec=dataclasses.replace(inputs.spec, nodes=tuple(nodes)))
    keys, device_groups = PlanKeys(inputs, few_gpus=0), DeviceGroups(inputs)
    assert len({keys.place([device_groups.of(ranks)]) for ranks in ((2, 3), (4, 5), (6, 7))}) == 3


def test_few_gpus_keep_their_names():
    inputs = lab(CLUSTER)
    keys, device_groups = PlanKeys(inputs), DeviceGroups(inputs)
    assert len({keys.place([device_groups.of(ranks)]) for ranks in ((2, 3), (4, 5))}) == 2


# The paper's SPLIT on the complete graph of GPUs, against the algorithm written out.


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
