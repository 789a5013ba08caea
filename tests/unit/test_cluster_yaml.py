from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.gpus.known_gpus import GPU_KINDS, INSTANCES, is_foreign
from zorse_megatron.inputs.cluster import Link, Nics
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
NVIDIA_KINDS = sorted(name for name in GPU_KINDS if not is_foreign(name))


def cluster(text):
    return parse_cluster(text.encode(), source="cluster.yaml")


def test_short_form():
    found = cluster("nodes:\n  - {count: 2, gpus: 8 x A100-40, nics: 4 x 100 Gb/s}")
    assert found.gpu_kinds == ("A100-40",) * 16
    assert [node.name for node in found.nodes] == ["node-0", "node-1"]
    assert [node.ranks for node in found.nodes] == [range(8), range(8, 16)]
    node = found.nodes[1]
    assert node.nics == Nics(count=4, bandwidth_bytes_per_s=12.5e9, latency_s=20e-6)
    assert node.nics.total_bytes_per_s == 50e9
    assert (node.link.type, node.link.bandwidth_bytes_per_s) == ("nvswitch", 243e9)
    assert node.host_link_bytes_per_s == 24e9
    assert node.region == found.regions[0]


def test_short_and_long_forms_are_equal():
    short = cluster("nodes: [{gpus: 4xT4, link: PCIe 6 GB/s, nics: 25 Gb/s}, g5.12xlarge]")
    long = cluster(
        """
nodes:
  - count: 1
    gpus: [{kind: T4, count: 2}, {kind: t4}, T4]
    link: {type: pcie, bandwidth: 6e9, latency: 10 us}
    nics: {count: 1, bandwidth: 3125 MB/s, latency: 20e-6}
  - instance: g5.12xlarge
    gpus: 4 x a10g
"""
    )
    assert short == long


def test_everything_explicit():
    found = cluster(
        """
name: lab
gpu_kinds:
  - {name: big, like: A100-80, memory: 96GiB}
  - name: own
    memory: 10GB
    memory_bandwidth: 500 GB/s
    peak: {float32: 20 TFLOP/s, float16: 40 TFLOP/s}
nodes:
  - {name: a, count: 2, gpus: 2 x big, nics: 100 Gb/s, host_memory: 1 TB, host_link: 20 GB/s,
     switch: leaf, region: west}
  - name: b
    gpus: [1 x own, 1 x V100-16]
    nics: {bandwidth: 10 Gb/s, latency: 50 us}
    region: east
switches:
  - {name: leaf, region: west, uplink: {to: spine, bandwidth: 400 Gb/s, latency: 1 us}}
  - {name: spine, region: west}
between_regions:
  - {regions: [east, west], bandwidth: 5 Gb/s, latency: 60 ms}
"""
    )
    assert found.name == "lab"
    assert found.gpu_kinds == ("big", "big", "big", "big", "own", "V100-16")
    assert list(found.kinds) == ["big", "own", "V100-16"]
    assert [node.name for node in found.nodes] == ["a-0", "a-1", "b"]
    assert found.gpu_of_rank(0).memory_bytes == 96 * 2**30
    assert found.gpu_of_rank(0).peak == GPU_KINDS["A100-80"].peak
    assert found.gpu_of_rank(4).peak.of("float16") == 40e12
    assert found.gpu_of_rank(4).memory_bytes_per_s == 500e9
    assert found.node_of_rank(3).host_memory_bytes == 10**12
    assert found.node_of_rank(3).host_link_bytes_per_s == 20e9
    # A node with several kinds has the link of the slowest.
    assert found.node_of_rank(5).link.type == "pcie"
    assert found.node_of_rank(5).nics.latency_s == 50e-6
    leaf, spine = found.switches
    assert leaf.uplink_to == "spine"
    assert leaf.uplink == Link(bandwidth_bytes_per_s=50e9, latency_s=1e-6)
    assert (spine.uplink_to, spine.uplink) == (None, None)
    assert found.regions == ("west", "east")
    (between,) = found.region_links
    assert (between.bandwidth_bytes_per_s, between.latency_s) == (0.625e9, 0.06)
    assert found.fingerprint().gpu_kinds == found.gpu_kinds


def test_a_well_known_kind_can_be_changed():
    found = cluster("gpu_kinds: [{name: T4, memory: 15GB}]\nnodes: [{gpus: 1 x T4}]")
    assert found.gpu_of_rank(0).memory_bytes == 15 * 10**9
    assert found.gpu_of_rank(0).peak == GPU_KINDS["T4"].peak


def test_what_is_said_goes_over_the_instance():
    found = cluster("nodes: [{instance: p4d.24xlarge, gpus: 4 x A100-80, nics: 50 Gb/s}]")
    node = found.nodes[0]
    assert node.gpu_kinds == ("A100-80",) * 4
    assert node.nics.total_bytes_per_s == 6.25e9
    assert node.host_memory_bytes == INSTANCES["p4d.24xlarge"].host_memory_bytes


def test_one_entry_for_all_other_pairs_of_regions():
    nodes = "".join(f"  - {{gpus: T4, nics: 1 Gb/s, region: {name}}}\n" for name in "abc")
    links = "  - {bandwidth: 1 Gb/s, latency: 9 ms}\n"
    special = "  - {regions: [c, a], bandwidth: 2 Gb/s, latency: 1 ms}\n"
    found = cluster(f"nodes:\n{nodes}between_regions:\n{links}{special}")
    rates = {frozenset(link.regions): link.bandwidth_bytes_per_s for link in found.region_links}
    assert rates == {frozenset("ab"): 125e6, frozenset("bc"): 125e6, frozenset("ac"): 250e6}


def test_a_single_node_needs_no_nics():
    assert cluster("nodes: [{gpus: 4 x L4}]").nodes[0].nics is None


def test_ranks_outside():
    found = cluster("nodes: [{gpus: 4 x L4}]")
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="ranks 0 to 3"):
            found.node_of_rank(rank)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 8), st.sampled_from(NVIDIA_KINDS)),
        min_size=1,
        max_size=5,
    )
)
def test_ranks_are_dealt_out_in_order(entries):
    lines = [f"  - {{count: {n}, gpus: {g} x {kind}, nics: 10 Gb/s}}" for n, g, kind in entries]
    found = cluster("nodes:\n" + "\n".join(lines))
    assert found.gpu_kinds == tuple(kind for n, g, kind in entries for _ in range(n * g))
    assert found.world_size == len(found.gpu_kinds)
    assert len({node.name for node in found.nodes}) == len(found.nodes)
    firsts = [node.first_rank for node in found.nodes]
    assert firsts == [0, *accumulate(len(node.gpu_kinds) for node in found.nodes)][:-1]
    for node in found.nodes:
        for rank in node.ranks:
            assert found.node_of_rank(rank) is node
            assert found.gpu_of_rank(rank).name == found.gpu_kinds[rank]
    assert all(first.ranks.stop == second.ranks.start for first, second in pairwise(found.nodes))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path):
    assert load_cluster(path).world_size


def test_examples_are_the_clusters_of_the_paper():
    sizes = {path.stem: load_cluster(path).world_size for path in EXAMPLES}
    assert sizes == {
        **dict.fromkeys(("mini-a", "mini-b", "mini-c"), 8),
        "two-node-lab": 8,
        "two-sites": 8,
        "zorse-paper-cluster-a": 20,
        "zorse-paper-cluster-b": 64,
        "zorse-paper-cluster-c": 128,
    }


@pytest.mark.parametrize("name", INSTANCES)
def test_instances(name):
    found = cluster(f"nodes: [{{instance: {name}, count: 2}}]")
    instance = INSTANCES[name]
    assert found.gpu_kinds == (instance.gpu_kind,) * (2 * instance.gpu_count)
    assert found.nodes[0].nics.count == instance.nic_count
