"""Prices of transfers and collectives: closed forms, a ring simulated step by step, rules."""

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.topologies import GB_PER_S, many_nodes, node, region_link, topologies, two_regions
from tests.unit.seen_nodes import ranks_of, timed
from zorse_megatron.costs import communication
from zorse_megatron.costs.communication import (
    UNEVEN_PENALTY,
    GraphComm,
    RankRing,
    RankRings,
    Shards,
    largest_load,
)
from zorse_megatron.costs.interface import CommCost
from zorse_megatron.costs.link_bandwidth import BandwidthCurve, LogFit
from zorse_megatron.costs.topology import MeasuredNode, Routes, Topology, topology_of
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.profile import (
    Profile,
    Source,
    dump_profile,
    parse_profile,
    unequal_parts,
)
from zorse_megatron.measure.machine import nodes_of
from zorse_megatron.measure.measured_profile import (
    unequal_factors,
    with_transfers,
    with_unequal_shards,
)
from zorse_megatron.measure.tasks import link_tasks

MB = 10**6
RATE = 10 * GB_PER_S  # of a NIC of tests.topologies.node


def even(comm: GraphComm, ranks: Sequence[int], total: int) -> float:
    return comm.all_gather_s(tuple(ranks), (total // len(ranks),) * len(ranks))


def test_point_to_point() -> None:
    comm: CommCost = GraphComm(two_regions())
    assert comm.transfer_s(3, 3, MB) == 0.0
    assert comm.transfer_s(0, 1, 80 * MB) == pytest.approx(4e-6 + 1e-3)
    assert comm.transfer_s(0, 4, 10 * MB) == pytest.approx(20e-6 + 1e-3)  # same leaf: the NIC
    assert comm.transfer_s(0, 8, 10 * MB) == pytest.approx(22e-6 + 1e-3)  # two uplinks more
    assert comm.transfer_s(0, 16, MB) == pytest.approx(0.03 + 21e-6 + 1e-3)
    assert comm.transfer_s(0, 16, 0) == pytest.approx(0.03 + 21e-6)
    assert ("w0/nic0:out", RATE) in comm.shared_links(0, 16)
    assert comm.host_link_bytes_per_s(20) == 16 * GB_PER_S


def test_the_narrowest_of_gpu_link_and_nic_counts() -> None:
    nodes = (node("a", num_nics=1, nic_bytes_per_s=50 * GB_PER_S), node("b", num_nics=4))
    comm = GraphComm(Topology.of(nodes=nodes))
    assert comm.transfer_s(0, 4, 10 * MB) == pytest.approx(20e-6 + 1e-3)  # one of b's NICs
    wide = GraphComm(Topology.of(nodes=(nodes[0], node("b", nic_bytes_per_s=50 * GB_PER_S))))
    assert wide.transfer_s(0, 4, 16 * MB) == pytest.approx(20e-6 + 1e-3)  # the GPU's PCIe


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_a_shared_nic_is_charged_once(num_gpus: int) -> None:
    """The same buffer over two nodes takes as long with eight GPUs on a NIC as with one."""
    nodes = tuple(
        node(name, num_gpus, link_latency_s=0.0, nic_latency_s=0.0) for name in ("a", "b")
    )
    comm = GraphComm(Topology.of(nodes=nodes))
    ranks = range(2 * num_gpus)
    expected = (len(ranks) - 1) / len(ranks) * 800 * MB / RATE
    sizes = (800 * MB // len(ranks),) * len(ranks)
    assert comm.all_gather_s(tuple(ranks), sizes) == pytest.approx(expected)


def simulate_ring(sizes: Sequence[float], rates: Sequence[float], hops_s: Sequence[float]) -> float:
    """All-gather on a ring, message by message: link i leads from member i to the next.

    A member sends its own shard first and then what it receives, one message at a time.
    """
    count = len(sizes)
    arrived = [[0.0 if owner == at else math.inf for owner in range(count)] for at in range(count)]
    free = [0.0] * count
    for step in range(count - 1):
        before = [list(row) for row in arrived]
        for at in range(count):
            owner, target = (at - step) % count, (at + 1) % count
            start = max(before[at][owner], free[at])
            free[at] = start + sizes[owner] / rates[at]
            arrived[target][owner] = free[at] + hops_s[at]
    return max(max(row) for row in arrived)


latencies = st.floats(0, 1e-3)


@given(st.integers(1, 4), st.integers(2, 5), latencies, latencies, st.integers(1, 100))
def test_ring_against_the_game_with_equal_rates(
    per_node: int, num_nodes: int, inside_s: float, between_s: float, megabytes: int
) -> None:
    """Where all links are equally fast the formula is exact."""
    spec = Topology.of(
        nodes=tuple(
            node(
                f"n{i}",
                per_node,
                link_bytes_per_s=RATE,
                link_latency_s=inside_s,
                nic_latency_s=between_s,
            )
            for i in range(num_nodes)
        )
    )
    count = spec.num_gpus
    hops = ([inside_s] * (per_node - 1) + [between_s]) * num_nodes
    expected = simulate_ring([megabytes * MB] * count, [RATE] * count, hops)
    found = GraphComm(spec).all_gather_s(tuple(range(count)), (megabytes * MB,) * count)
    assert found == pytest.approx(expected)


@settings(max_examples=examples(60))
@given(topologies(), st.integers(1, 50 * MB))
def test_ring_against_the_game(spec: Topology, size: int) -> None:
    """In any cluster: at least the slowest link's share, at most one more pass of every link."""
    comm = GraphComm(spec)
    ranks = tuple(sorted(range(spec.num_gpus), key=lambda r: spec.node_with(r).region))
    if len(ranks) < 2 or spec.switches:
        return
    found = comm.all_gather_s(ranks, (size,) * len(ranks))
    pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    rates, hops = [], []
    for first, second in pairs:
        same = spec.node_of(first) == spec.node_of(second)
        node_of = spec.node_with(first)
        # Between nodes all NICs of the ranks there work together, each with its part of a message.
        nodes = [spec.node_with(rank) for rank in (first, second)]
        wide = [min(n.nics_bytes_per_s, n.num_gpus * n.host_link_bytes_per_s) for n in nodes]
        between = comm.routes.between_nodes(spec.node_of(first), spec.node_of(second))
        rates.append(
            node_of.link.bandwidth_bytes_per_s
            if same
            else min(*wide, *(link.bytes_per_s for link in between), math.inf)
        )
        hops.append(comm.routes.route(first, second).latency_s)
    simulated = simulate_ring([float(size)] * len(ranks), rates, hops)
    one_pass = sum(size / rate for rate in rates)
    # Links between regions that the ring passes twice are shared, which the game leaves out.
    is_shared = len({node.region for node in spec.nodes}) == 3
    assert simulated <= found + one_pass
    assert is_shared or found <= simulated + sum(hops) + 1e-12


sizes_lists = st.lists(st.integers(0, 1000), min_size=2, max_size=12).filter(any)


@given(sizes_lists)
def test_the_busiest_link_carries_all_but_the_smallest_shard(sizes: list[int]) -> None:
    """Each shard goes from its owner around the ring and ends before it would come back."""
    count = len(sizes)
    carried = [0] * count  # by the link from a rank to the next
    for owner, size in enumerate(sizes):
        for hop in range(count - 1):
            carried[(owner + hop) % count] += size
    assert Shards.of(tuple(sizes)).ring_bytes == max(carried)


def test_uneven_shards_cost_what_cephalo_measured() -> None:
    spec = Topology.of(nodes=tuple(node(f"n{i}", 1, nic_latency_s=0.0) for i in range(4)))
    comm = GraphComm(spec)
    ranks = tuple(range(4))
    assert UNEVEN_PENALTY == 1.25
    assert comm.all_gather_s(ranks, (70 * MB, 10 * MB, 10 * MB, 10 * MB)) == pytest.approx(
        1.25 * 90 * MB / RATE
    )
    nearly_even = (28 * MB, 24 * MB, 24 * MB, 24 * MB)
    assert comm.all_gather_s(ranks, nearly_even) == pytest.approx(1.25 * 76 * MB / RATE)
    assert even(comm, ranks, 100 * MB) == pytest.approx(75 * MB / RATE)
    # A member without a shard takes part.
    assert comm.all_gather_s(ranks, (0, 0, 0, 100 * MB)) == pytest.approx(1.25 * 100 * MB / RATE)


def test_small_shards_cost_the_latency_of_every_step() -> None:
    """Of N - 1 steps; a form in two levels would have fewer over slow links, but none runs."""
    nodes = tuple(node(f"n{i}", 8, link_latency_s=1e-6, nic_latency_s=1e-3) for i in range(4))
    comm = GraphComm(Topology.of(nodes=nodes))
    found = comm.all_gather_s(tuple(range(32)), (1000,) * 32)
    assert found == pytest.approx(31 * 1000 / RATE + 4 * 7e-6 + 3e-3 + 1e-3 - 1e-6)


def test_uplinks_and_far_links_are_passed_once_each_way() -> None:
    comm = GraphComm(two_regions())
    ranks = tuple(range(24))
    shard = 240 * MB
    expected = 23 * shard / GB_PER_S
    found = comm.all_gather_s(ranks, (shard,) * 24)
    assert found == pytest.approx(expected, rel=0.02) and found > expected + 2 * 0.03 - 1e-3
    west = tuple(range(16))
    assert comm.all_gather_s(west, (shard,) * 16) == pytest.approx(15 * shard / RATE, rel=0.01)


def test_a_ring_over_a_chain_of_regions_passes_the_middle_twice() -> None:
    regions = ("a", "b", "c")
    links = tuple(region_link(pair, GB_PER_S, 0.0) for pair in (("a", "b"), ("a", "c")))
    nodes = tuple(node(name, 1, region=name, nic_latency_s=0.0) for name in regions)
    comm = GraphComm(Topology.of(nodes=nodes, region_links=links))
    # a > b > c > a: b to c goes through a, on links that carry a to b and c to a the other way.
    assert even(comm, (0, 1, 2), 300 * MB) == pytest.approx(200 * MB / GB_PER_S)
    names = [name for name, _ in comm.shared_links(1, 2)]
    assert "a--b:b>a" in names and "a--c:a>c" in names


def test_all_reduce_is_latency() -> None:
    nodes = tuple(node(f"n{i}", 8) for i in range(16))
    comm = GraphComm(Topology.of(nodes=nodes))
    ranks = tuple(range(128))
    tree = 2 * (3 * 4e-6 + 4 * 20e-6)
    assert comm.all_reduce_s(ranks, 8) == pytest.approx(tree, rel=1e-3)
    assert comm.all_reduce_s(ranks[:8], 8) == pytest.approx(2 * 3 * 4e-6, rel=1e-3)
    assert comm.all_reduce_s(ranks[:1], 8) == 0.0
    large = 1280 * MB  # then the ring wins: 2 (N - 1) / N bytes
    assert comm.all_reduce_s(ranks, large) == pytest.approx(2 * 127 / 128 * large / RATE, rel=0.03)


def with_curves(name: str) -> MeasuredNode:
    """Curves like those that are published for GH200 nodes of four."""

    def curve(a: float, b: float, c: float, cap: float) -> BandwidthCurve:
        return BandwidthCurve(
            max_bytes_per_s=cap * GB_PER_S, fit=LogFit(quadratic=a, linear=b, constant=c)
        )

    return node(
        name,
        num_nics=4,
        intra_curves=((2, curve(-0.5, 14, 44, 125)), (4, curve(-0.75, 26, 82, 250))),
        nic_curves=((1, curve(-0.16, 2.8, 11.7, 23)), (4, curve(-0.65, 11.4, 45, 92))),
    )


def test_curves_replace_constants() -> None:
    spec = Topology.of(nodes=tuple(with_curves(f"n{i}") for i in range(2)))
    comm = GraphComm(spec)
    first = spec.nodes[0]
    for size in (1000, MB, 64 * MB):
        assert comm.transfer_s(0, 1, size) == first.intra_curves[0][1].transfer_s(size)
        assert comm.transfer_s(0, 4, size) == first.nic_curves[0][1].transfer_s(size)
    ring = comm.all_gather_s((0, 1, 2, 3), (8 * MB,) * 4)
    assert ring == pytest.approx(3 * first.intra_curves[1][1].transfer_s(8 * MB))
    # One rank of each node: the curve of one GPU. All: that of four.
    one = comm.all_gather_s((0, 4), (8 * MB,) * 2)
    assert one == pytest.approx(first.nic_curves[0][1].transfer_s(8 * MB))
    everyone = comm.all_gather_s(tuple(range(8)), (8 * MB,) * 8)
    assert everyone == pytest.approx(7 * first.nic_curves[1][1].transfer_s(8 * MB))
    assert comm.all_reduce_s((0, 4), 8) > 0


@settings(max_examples=examples(60))
@given(topologies(), st.data())
def test_what_holds_in_every_cluster(spec: Topology, data: st.DataObject) -> None:
    comm = GraphComm(spec)
    everyone = list(range(spec.num_gpus))
    ranks = tuple(data.draw(st.permutations(everyone)))[: data.draw(st.integers(1, len(everyone)))]
    sizes = tuple(data.draw(st.integers(0, 50 * MB)) for _ in ranks)
    time_s = comm.all_gather_s(ranks, sizes)
    assert comm.reduce_scatter_s(ranks, sizes) == time_s
    assert 0 <= time_s < math.inf
    if len(ranks) == 1 or not any(sizes):
        assert time_s == 0
        return
    # The order of the ranks does not matter, more bytes do.
    order = data.draw(st.permutations(range(len(ranks))))
    shuffled = tuple(ranks[i] for i in order), tuple(sizes[i] for i in order)
    assert comm.all_gather_s(*shuffled) == pytest.approx(time_s)
    assert comm.all_gather_s(ranks, tuple(2 * size for size in sizes)) >= time_s
    total = sum(sizes)
    even_s = comm.all_gather_s(ranks, (total / len(ranks),) * len(ranks))  # type: ignore[arg-type]
    assert even_s <= time_s * (1 + 1e-9)
    for other in ranks[1:]:
        assert comm.transfer_s(ranks[0], other, MB) > comm.transfer_s(ranks[0], other, 0) >= 0
    assert comm.all_reduce_s(ranks, 8) > 0


def test_an_exchange_over_one_link_each_is_as_a_ring_in_bytes() -> None:
    """One rank on each of three nodes of one switch: (n - 1) / n of the buffer through each NIC."""
    spec = Topology.of(nodes=tuple(node(name, 1) for name in "abc"))
    found = GraphComm(spec).exchange_s((0, 1, 2), (10 * MB,) * 3)
    latency_s = found - 20 * MB / RATE
    assert 0 < latency_s < 100e-6
    # All owned by one rank: everybody's whole part goes there.
    assert GraphComm(spec).exchange_s((0, 1, 2), (0, 30 * MB, 0)) == pytest.approx(
        60 * MB / RATE + latency_s
    )


def test_an_exchange_crosses_a_shared_link_rank_by_rank() -> None:
    """Two nodes of four: 16 of 64 messages one way, each of an eighth: twice a ring's bytes."""
    spec = Topology.of(nodes=(node("a"), node("b")))
    comm = GraphComm(spec)
    found = comm.exchange_s(tuple(range(8)), (8 * MB,) * 8)
    assert found == pytest.approx(16 * 8 * MB / RATE, rel=0.01)
    assert found > 2 * comm.reduce_scatter_s(tuple(range(8)), (8 * MB,) * 8)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, max_size=9),
)
def test_largest_load_is_the_sum_over_all_messages(ranks: list[tuple[int, int]]) -> None:
    loads = [0]
    for side in {side for side, _ in ranks}:
        messages = [(a, b, size) for a, _ in ranks for b, size in ranks]
        loads.append(sum(size for a, b, size in messages if a == side != b))
        loads.append(sum(size for a, b, size in messages if a != side == b))
    assert largest_load(*zip(*ranks, strict=True)) == max(loads)


# Rings of ranks: what like nodes share is what each node by itself says.


LIKE_BUT_FOR_ONE_THING = """
nodes:
  - {name: a, count: 3, gpus: 4 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
  - {name: rings, count: 3, gpus: 4 x T4, link: PCIe 7 GB/s, nics: 25 Gb/s}
  - {name: nics, count: 3, gpus: 4 x T4, link: PCIe 6 GB/s, nics: 2 x 10 Gb/s}
  - {name: big, count: 3, gpus: 8 x T4, link: PCIe 6 GB/s, nics: 25 Gb/s}
"""


def two_sites() -> Topology:
    """The same nodes in two regions: some with slow NICs, some measured."""
    nodes = [
        each
        for region in ("west", "east")
        for number in range(2)
        for each in (
            node(f"{region}-{number}", region=region),
            node(f"{region}-late-{number}", region=region, nic_latency_s=90e-6),
            dataclasses.replace(with_curves(f"{region}-measured-{number}"), region=region),
        )
    ]
    return Topology.of(nodes, (), (region_link(("west", "east"), GB_PER_S, 0.03),))


def node_by_node(spec: Topology, ranks: tuple[int, ...]) -> RankRing:
    """Nothing is shared: no two nodes look alike, and no TP group follows another."""

    def name(node: MeasuredNode) -> tuple[object, ...]:
        return (node.name,)

    with mock.patch.object(communication, "_look", name):
        return RankRings(Routes(spec)).of(ranks)


def test_sets_are_as_without_what_sets_before_have_left() -> None:
    rng = random.Random(5)
    lab = topology_of(parse_cluster(LIKE_BUT_FOR_ONE_THING.encode()))
    found = set()
    for spec in (lab, two_sites(), two_regions(), many_nodes(6)):
        rings = RankRings(Routes(spec))
        for _ in range(60):
            ranks = rng.sample(range(spec.num_gpus), rng.randint(1, spec.num_gpus))
            both = [tuple(ranks), tuple(sorted(ranks))]
            for each in both:
                assert rings.of(each) == node_by_node(spec, each)
            found.add(rings.of(both[0]))
    assert len(found) > 60


# What collectives over unequal shards cost: measured, in the profile, and in the price.


def measured(nodes, factors):
    """A profile of a cluster on which unequal shards take so many times longer. By operation."""
    profile = Profile(schema_version=1, sources=(Source(name="zorse discover", kind="measured"),))
    for task in link_tasks(nodes_of(ranks_of(nodes))):
        answer = timed(task, latency_s=0.0)
        factor = factors.get(task.operation.removesuffix("_unequal"), 1.0)
        if task.operation.endswith("_unequal"):
            answer = replace(answer, time_s=tuple(factor * time_s for time_s in answer.time_s))
        profile = with_transfers(profile, answer)
    found = unequal_factors(profile.transfers)
    profile = with_unequal_shards(profile, "zorse discover", found)
    assert parse_profile(dump_profile(profile).encode()) == profile
    return profile


def comm_of(nodes, profile):
    lines = "".join(f"  - {{gpus: 1 x {kind}, nics: 80 Gb/s}}\n" for kind in nodes)
    return GraphComm(topology_of(parse_cluster(f"nodes:\n{lines}".encode()), profile))


@given(st.integers(2, 6), st.floats(1.5, 4.0), st.floats(1.5, 4.0))
def test_what_was_timed_is_what_is_priced(count, gather, reduction):
    """Of shards like the measured ones; the ring of one node's GPUs has no latency here."""
    nodes = [["T4"] * count]
    profile = measured(nodes, {"all_gather": gather, "reduce_scatter": reduction})
    link = "{type: nvlink, bandwidth: 8 Gb/s, latency: 0 us}"
    cluster = f"nodes:\n  - {{gpus: {count} x T4, link: {link}}}\n"
    comm = GraphComm(topology_of(parse_cluster(cluster.encode()), profile))
    ranks = tuple(range(count))
    parts = unequal_parts(count)
    total = 12 * count * sum(parts) * MB
    unequal = tuple(total // sum(parts) * part for part in parts)
    equal = (total // count,) * count
    assert comm.all_gather_s(ranks, unequal) == pytest.approx(
        gather * comm.all_gather_s(ranks, equal)
    )
    assert comm.reduce_scatter_s(ranks, unequal) == pytest.approx(
        reduction * comm.reduce_scatter_s(ranks, equal)
    )


def test_unequal_shards_are_never_faster_than_equal_ones():
    """On CPUs the two forms take as long; for less unequal shards the bytes tell less."""
    profile = measured([["T4"], ["T4"]], {"all_gather": 1.0})
    comm = comm_of(["T4", "T4"], profile)
    equal_s = comm.all_gather_s((0, 1), (50 * MB, 50 * MB))
    assert comm.all_gather_s((0, 1), (55 * MB, 45 * MB)) == pytest.approx(equal_s)
    assert comm.all_gather_s((0, 1), (75 * MB, 25 * MB)) == pytest.approx(equal_s)


def test_without_a_measurement_of_these_gpus_it_is_cephalos():
    profile = measured([["T4"], ["T4"]], {"all_gather": 3.0})
    assert {(each.link, each.gpu_kinds) for each in profile.unequal_shards} == {
        ("inter-node", ("T4",))
    }
    sizes = (75 * MB, 25 * MB)
    for kind, changes in (("T4", True), ("L4", False)):
        plain, known = comm_of([kind] * 2, None), comm_of([kind] * 2, profile)
        ratio = known.all_gather_s((0, 1), sizes) / plain.all_gather_s((0, 1), sizes)
        # Their bytes alone take 1.5 times as long: the largest shard, in place of half the buffer.
        assert ratio == pytest.approx(3.0 / 1.5 / 1.25 if changes else 1.0)


def test_the_largest_message_of_both_counts_and_the_slower_of_two_nodes():
    tasks = [
        t for t in link_tasks(nodes_of(ranks_of([["T4", "T4"]]))) if "all_gather" in t.operation
    ]
    equal, unequal = (timed(task, latency_s=0.0) for task in tasks)
    cut = replace(
        unequal,
        num_bytes=unequal.num_bytes[:3],
        time_s=tuple(2 * time_s for time_s in unequal.time_s[:3]),
    )
    (found,) = unequal_factors([equal, cut])
    assert found.factor == pytest.approx(2 / 1.5)
    other = [replace(each, nodes=("another kind",)) for each in (equal, unequal)]
    for order in ([equal, cut, *other], [*other, equal, cut]):
        (found,) = unequal_factors(order)
        assert found.factor == pytest.approx(2 / 1.5)
    assert unequal_factors([equal]) == []
