"""From a cluster file and a profile to the topology."""

from pathlib import Path

import pytest

from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.topology import topology_of
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.profile import LinkCurve, Profile, Source

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


def cluster() -> Cluster:
    return parse_cluster(TEXT)


def test_nodes_and_switches() -> None:
    spec = topology_of(cluster())
    big, odd, far = spec.nodes
    assert (big.num_gpus, odd.num_gpus, far.num_gpus) == (8, 3, 4)
    assert odd.gpu_kinds == ("V100-16", "V100-16", "T4")
    assert [node.link.type for node in spec.nodes] == ["nvswitch", "pcie", "nvlink"]
    assert big.nics_bytes_per_s == 50e9 and big.num_ports == 4
    assert spec.uplink_bytes_per_s["leaf"] == 25e9
    assert spec.switch_named["leaf"].uplink_latency_s == pytest.approx(2e-6)
    assert spec.num_gpus == cluster().world_size
    for rank in range(spec.num_gpus):
        node = spec.nodes[spec.node_of(rank)]
        assert node.name == cluster().node_of_rank(rank).name


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
    big, odd, far = topology_of(cluster(), profile).nodes
    assert not big.nic_curves and not odd.nic_curves  # another kind; several kinds
    assert [sharing for sharing, _ in far.nic_curves] == [1, 4]
    assert far.nics_bytes_per_s == 6e9 and far.peer_bytes_per_s == 200e9


def test_a_lone_node_needs_no_nics() -> None:
    spec = topology_of(parse_cluster(b"nodes: [{name: only, gpus: 4 x T4}]"))
    assert GraphComm(spec).all_gather_s((0, 1, 2, 3), (10**6,) * 4) > 0
