"""Summaries of TP groups of ranks: what like nodes share is what each node by itself says."""

import dataclasses
import random
from unittest import mock

from tests.topologies import GB_PER_S, many_nodes, node, region_link, two_regions
from tests.unit.test_comm_cost import with_curves
from zorse_megatron.costs import communication
from zorse_megatron.costs.communication import RankRing, RankRings
from zorse_megatron.costs.topology import MeasuredNode, Routes, Topology, topology_of
from zorse_megatron.inputs.cluster_yaml import parse_cluster

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
