"""Names of plans: the same for like nodes and GPUs in turn, and for nothing else."""

import dataclasses
from itertools import permutations

import pytest

from tests.unit.test_planner_search import lab
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.search.sources import PlanKeys

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
