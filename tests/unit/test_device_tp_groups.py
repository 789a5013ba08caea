"""TP groups of GPUs as devices, and the communication of tensor-parallel groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.validation.device_tp_groups import TpGroupComm, as_devices
from tests.topologies import node
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.link_bandwidth import BandwidthCurve, LogFit, curve_for
from zorse_megatron.costs.topology import Topology

MIB = 2**20


def curve(quadratic: float, linear: float, constant: float, most: float) -> BandwidthCurve:
    fit = LogFit(quadratic=quadratic, linear=linear, constant=constant)
    return BandwidthCurve(max_bytes_per_s=most, fit=fit)


# Inside and between GH200 nodes, by Sailor (SOSP 2025, MIT), rounded.
INSIDE = ((2, curve(-0.523, 14.226, 44.102, 125e9)), (4, curve(-0.752, 26.468, 82.062, 250e9)))
BETWEEN = ((1, curve(-0.166, 2.794, 11.744, 22.9e9)), (4, curve(-0.654, 11.426, 45.250, 92.6e9)))


def cluster(num_gpus: int = 4, count: int = 3, **options) -> Topology:
    return Topology.of(
        nodes=tuple(node(f"n{index}", num_gpus, **options) for index in range(count))
    )


def test_one_gpu_each_changes_nothing():
    spec = cluster()
    assert as_devices(spec, 1) is spec


def test_links_of_a_device():
    spec = cluster(8, num_nics=8)
    one, (device, *_) = spec.nodes[0], as_devices(spec, 4).nodes
    assert device.num_gpus == 2 and device.gpu_kinds == one.gpu_kinds[:2]
    assert device.link.bandwidth_bytes_per_s == 4 * one.link.bandwidth_bytes_per_s
    assert device.host_link_bytes_per_s == 4 * one.host_link_bytes_per_s
    assert device.nics_bytes_per_s == one.nics_bytes_per_s
    assert device.port_bytes_per_s == 4 * one.port_bytes_per_s


@given(st.integers(16, 34))
def test_curves_are_those_of_all_gpus_at_once(log2_bytes):
    """A message of a device is one quarter of it from each GPU, all at the same time."""
    spec = cluster(intra_curves=INSIDE, nic_curves=BETWEEN)
    device = as_devices(spec, 4).nodes[0]
    whole = 2.0**log2_bytes
    at_once = 4 * curve_for(BETWEEN, 4).transfer_s(whole / 4)  # measured: what all send together
    assert curve_for(device.nic_curves, 1).transfer_s(whole) == pytest.approx(at_once)
    each = curve_for(INSIDE, 4).transfer_s(whole / 4)  # measured: what each sends
    assert curve_for(device.intra_curves, 1).transfer_s(whole) == pytest.approx(each)


def test_tp_groups_that_do_not_fit_a_node():
    with pytest.raises(ValueError, match="multiple of 4"):
        as_devices(cluster(6), 4)
    mixed = node("mixed", 4, gpu_kinds=("A", "A", "A", "B"))
    with pytest.raises(ValueError, match="equal GPUs"):
        as_devices(Topology.of(nodes=(mixed,)), 2)


def test_each_rank_with_a_nic_sends_as_if_alone():
    spec = cluster(num_nics=4)
    sets, ranks = TpGroupComm(spec, 4), GraphComm(spec)
    assert sets.transfer_s(0, 1, 4 * MIB) == pytest.approx(ranks.transfer_s(0, 4, MIB))
    shards = (MIB, MIB, MIB)
    assert sets.all_gather_s((0, 1, 2), shards) == pytest.approx(
        ranks.all_gather_s((0, 4, 8), shards)
    )
    assert sets.reduce_scatter_s((0, 1, 2), shards) == sets.all_gather_s((0, 1, 2), shards)
    assert sets.host_link_bytes_per_s(1) == ranks.host_link_bytes_per_s(5)
    links = dict(sets.shared_links(0, 1))
    alone = [rate for _, rate in ranks.shared_links(0, 4)]
    assert sorted(links.values()) == pytest.approx(sorted(4 * rate for rate in alone))


def test_ranks_that_share_a_nic_divide_it():
    spec = cluster(num_nics=1)
    sets, ranks = TpGroupComm(spec, 4), GraphComm(spec)
    latency_s = ranks.transfer_s(0, 4, 0)
    alone_s = ranks.transfer_s(0, 4, 64 * MIB) - latency_s
    assert sets.transfer_s(0, 1, 4 * 64 * MIB) - latency_s == pytest.approx(4 * alone_s)


def test_every_set_counts_once_in_statistics():
    spec = cluster()
    assert TpGroupComm(spec, 4).all_reduce_s((0, 1, 2), 4) == pytest.approx(
        GraphComm(as_devices(spec, 4)).all_reduce_s((0, 1, 2), 16)
    )
