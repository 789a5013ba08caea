"""The topology of a cluster as its file describes it."""

from collections.abc import Mapping

from zorse_megatron.schema.cluster.cluster import Cluster, Node
from zorse_megatron.schema.profile.profile import Profile
from zorse_megatron.topology.cluster_topology import MeasuredNode, Topology
from zorse_megatron.topology.link_curves import BandwidthCurve, Curves, LogFit, as_curves


def topology_of(cluster: Cluster, profile: Profile | None = None) -> Topology:
    """Take over nodes, switches and links; measured curves of a profile replace the file's rates.

    Curves were measured on nodes with one kind of GPU. A node with several kinds keeps the figures
    of the file. Pass no profile to go by the file alone.
    """
    intra_curves = _curves_by_kind(profile, "intra-node")
    nic_curves = _curves_by_kind(profile, "inter-node")
    return Topology(
        nodes=tuple(
            _node(node, _curves(node, intra_curves), _curves(node, nic_curves))
            for node in cluster.nodes
        ),
        switches=cluster.switches,
        region_links=cluster.region_links,
        unequal_shards=profile.unequal_shards if profile else (),
    )


def measured_curves(profile: Profile, kind: str) -> tuple[Curves, Curves]:
    """What was measured inside and between nodes of one kind of GPU; empty where nothing was."""
    links = (_curves_by_kind(profile, link) for link in ("intra-node", "inter-node"))
    inside, between = (curves.get(kind, ()) for curves in links)
    return inside, between


def _curves_by_kind(profile: Profile | None, link: str) -> dict[str, Curves]:
    found: dict[str, list[tuple[int, BandwidthCurve]]] = {}
    for entry in profile.links if profile else ():
        if entry.link == link:
            fit = LogFit(quadratic=entry.quadratic, linear=entry.linear, constant=entry.constant)
            curve = BandwidthCurve(max_bytes_per_s=entry.max_bytes_per_s, fit=fit)
            found.setdefault(entry.gpu_kind, []).append((entry.gpus_sharing, curve))
    return {kind: as_curves(pairs) for kind, pairs in found.items()}


def _curves(node: Node, by_kind: Mapping[str, Curves]) -> Curves:
    """Those of its GPUs, if they are the same for all of them."""
    first, *others = {by_kind.get(kind, ()) for kind in node.gpu_kinds}
    return () if others else first


def _node(node: Node, intra_curves: Curves, nic_curves: Curves) -> MeasuredNode:
    return MeasuredNode(**vars(node), intra_curves=intra_curves, nic_curves=nic_curves)
