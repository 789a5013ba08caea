"""Candidates for groups: valid, different, in a fixed order; symmetry against brute force."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.topologies import many_nodes, node, switch, topologies, two_regions
from zorse_megatron.costs.topology import Topology, topology_of
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.planner.groupings.neighbours import neighbours
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
from zorse_megatron.planner.groupings.proposals import propose_groupings
from zorse_megatron.planner.groupings.symmetry import Symmetry

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
    assert families == {"together", "split", "by", "pools:"}


@pytest.mark.slow
def test_the_order_does_not_depend_on_the_process() -> None:
    script = (
        "from tests.topologies import two_regions\n"
        "from zorse_megatron.planner.groupings.neighbours import neighbours\n"
        "from zorse_megatron.planner.groupings.proposals import propose_groupings\n"
        "found = list(propose_groupings(two_regions(), limit=150))\n"
        "found += neighbours(two_regions(), found[40].grouping)\n"
        "print(found)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop()) > 1000


def test_like_speeds_come_first_when_asked() -> None:
    nodes = (node("a", 4), node("b", 4, kind="B"))
    spec = Topology.of(nodes=nodes)

    def first_with_three(speeds: dict[str, float]) -> Grouping:
        found = propose_groupings(spec, speeds=speeds)
        return next(
            each.grouping
            for each in found
            if len(each.grouping) == 3 and each.origin.startswith("pools")
        )

    assert first_with_three({"A": 2.0, "B": 1.0}) == ((0, 1), (2, 3), (4, 5, 6, 7))
    assert first_with_three({"A": 1.0, "B": 2.0}) == ((0, 1, 2, 3), (4, 5), (6, 7))


@pytest.mark.slow
def test_ten_thousand_gpus() -> None:
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
