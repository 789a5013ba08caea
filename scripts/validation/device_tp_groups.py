"""TP groups of GPUs of a node as one device: how tensor-parallel ranks use links, all at once.

A device has the links of all its GPUs together. Of measured curves it takes those with as many
GPUs at once; where they say what one GPU gets, the device gets as many times that.
"""

import dataclasses
import math

from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.link_bandwidth import BandwidthCurve, Curves, LogFit, curve_for
from zorse_megatron.costs.topology import MeasuredNode, Topology


def as_devices(spec: Topology, gpus_each: int) -> Topology:
    """Return the cluster with TP groups of `gpus_each` neighbours as devices; rank n is GPU n *
    each on.

    Raises ValueError for a node whose GPUs cannot be grouped so.
    """
    if gpus_each == 1:
        return spec
    nodes = [_node(node, gpus_each) for node in spec.nodes]
    return Topology.of(nodes, spec.switches, spec.region_links, spec.unequal_shards)


def _node(node: MeasuredNode, each: int) -> MeasuredNode:
    kinds = node.gpu_kinds
    tp_groups = [kinds[first : first + each] for first in range(0, len(kinds), each)]
    if len(kinds) % each or any(len(set(members)) > 1 for members in tp_groups):
        raise ValueError(
            f"node {node.name}: found GPUs {kinds}; expected a multiple of {each}, with equal GPUs "
            f"in each TP group of {each}"
        )
    return dataclasses.replace(
        node,
        gpu_kinds=tuple(members[0] for members in tp_groups),
        link=dataclasses.replace(
            node.link, bandwidth_bytes_per_s=each * node.link.bandwidth_bytes_per_s
        ),
        host_link_bytes_per_s=each * node.host_link_bytes_per_s,
        intra_curves=_curves(node.intra_curves, each, len(tp_groups), factor=each),
        nic_curves=_curves(node.nic_curves, each, len(tp_groups), factor=1),
    )


def _curves(curves: Curves, each: int, num_sets: int, *, factor: int) -> Curves:
    """Curves by number of devices; `factor`: how many times a measured curve a device gets."""
    if not curves:
        return ()
    return tuple(
        (count, _scaled(curve_for(curves, count * each), each, factor))
        for count in range(1, num_sets + 1)
    )


def _scaled(curve: BandwidthCurve, each: int, factor: int) -> BandwidthCurve:
    """The curve of a message that is sent in `each` equal parts at once."""
    fit = curve.fit
    if fit is not None:
        shift = math.log2(each)  # x of a part is x of the whole less this
        fit = LogFit(
            quadratic=factor * fit.quadratic,
            linear=factor * (fit.linear - 2 * fit.quadratic * shift),
            constant=factor * ((fit.quadratic * shift - fit.linear) * shift + fit.constant),
        )
    return BandwidthCurve(
        max_bytes_per_s=factor * curve.max_bytes_per_s, latency_s=curve.latency_s, fit=fit
    )


class TpGroupComm:
    """`CommCost` of TP groups of `tensor_parallel` neighbouring GPUs, one rank for each; see
    `costs.interface`.

    Sizes of collectives are those of one GPU. All GPUs of a TP group send as much at the same time,
    each to its counterpart, so a TP group counts as one device with the links of all its GPUs and
    as many times the bytes. Of an activation each GPU sends its part, so a TP group sends it once.
    """

    def __init__(self, spec: Topology, tensor_parallel: int) -> None:
        self.size = tensor_parallel
        self.comm = GraphComm(as_devices(spec, tensor_parallel))

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Point to point."""
        return self.comm.transfer_s(source, target, num_bytes)

    def shared_links(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        """Links on the way with what each carries."""
        return self.comm.shared_links(source, target)

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As many reductions at once as a TP group has GPUs."""
        return self.comm.reduce_scatter_s(ranks, tuple(self.size * size for size in shard_bytes))

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As many gathers at once as a TP group has GPUs, each over one GPU of each TP group."""
        return self.comm.all_gather_s(ranks, tuple(self.size * size for size in shard_bytes))

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        """As many exchanges at once as a TP group has GPUs."""
        return self.comm.exchange_s(ranks, tuple(self.size * size for size in shard_bytes))

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        """Over TP groups, each of which counts once."""
        return self.comm.all_reduce_s(ranks, self.size * num_bytes)

    def host_link_bytes_per_s(self, rank: int) -> float:
        """PCIe of one GPU to host memory."""
        return self.comm.host_link_bytes_per_s(rank) / self.size
