"""The topology of a cluster as its file describes it."""

from collections.abc import Mapping

from zorse_megatron.schema.cluster.cluster import Cluster, Node, Switch
from zorse_megatron.schema.profile.profile import Profile
from zorse_megatron.topology.curves import Curves, LinkCurve, LogFit, as_curves
from zorse_megatron.topology.spec import (
    IntraKind,
    NodeSpec,
    RegionLink,
    SwitchSpec,
    TopologySpec,
)

_INTRA_KINDS: dict[str, IntraKind] = {"nvswitch": "switch", "nvlink": "mesh", "pcie": "pcie"}


def topology_of(cluster: Cluster, profile: Profile | None = None) -> TopologySpec:
    """Take over nodes, switches and links; measured curves of a profile replace the file's rates.

    Curves were measured on nodes with one kind of GPU. A node with several kinds keeps the figures
    of the file. Pass no profile, or one without `links`, to go by the file alone.
    """
    intra_curves = _curves_by_kind(profile, "intra-node")
    nic_curves = _curves_by_kind(profile, "inter-node")
    return TopologySpec(
        nodes=tuple(
            _node(node, _curves(node, intra_curves), _curves(node, nic_curves))
            for node in cluster.nodes
        ),
        switches=tuple(_switch(switch) for switch in cluster.switches),
        region_links=tuple(
            RegionLink(
                regions=link.regions,
                bytes_per_s=link.bandwidth_bytes_per_s,
                latency_s=link.latency_s,
            )
            for link in cluster.region_links
        ),
    )


def measured_curves(profile: Profile, kind: str) -> tuple[Curves, Curves]:
    """What was measured inside and between nodes of one kind of GPU; empty where nothing was."""
    links = (_curves_by_kind(profile, link) for link in ("intra-node", "inter-node"))
    inside, between = (curves.get(kind, ()) for curves in links)
    return inside, between


def _curves_by_kind(profile: Profile | None, link: str) -> dict[str, Curves]:
    found: dict[str, list[tuple[int, LinkCurve]]] = {}
    for entry in profile.links if profile else ():
        if entry.link == link:
            fit = LogFit(quadratic=entry.quadratic, linear=entry.linear, constant=entry.constant)
            curve = LinkCurve(max_bytes_per_s=entry.max_bytes_per_s, fit=fit)
            found.setdefault(entry.gpu_kind, []).append((entry.gpus_sharing, curve))
    return {kind: as_curves(pairs) for kind, pairs in found.items()}


def _curves(node: Node, by_kind: Mapping[str, Curves]) -> Curves:
    return by_kind.get(node.gpu_kinds[0], ()) if len(set(node.gpu_kinds)) == 1 else ()


def _node(node: Node, intra_curves: Curves, nic_curves: Curves) -> NodeSpec:
    nics = node.nics
    return NodeSpec(
        name=node.name,
        gpu_kinds=node.gpu_kinds,
        intra_kind=_INTRA_KINDS[node.link.type],
        intra_bytes_per_s=node.link.bandwidth_bytes_per_s,
        intra_latency_s=node.link.latency_s,
        host_link_bytes_per_s=node.host_link_bytes_per_s,
        # Without NICs there is no other node, and nothing ever takes this link.
        nic_bytes_per_s=nics.bandwidth_bytes_per_s if nics else node.host_link_bytes_per_s,
        nic_latency_s=nics.latency_s if nics else 0.0,
        num_nics=nics.count if nics else 1,
        region=node.region,
        switch=node.switch,
        intra_curves=intra_curves,
        nic_curves=nic_curves,
    )


def _switch(switch: Switch) -> SwitchSpec:
    return SwitchSpec(
        name=switch.name,
        region=switch.region,
        uplink=switch.uplink_to,
        uplink_bytes_per_s=switch.uplink.bandwidth_bytes_per_s if switch.uplink else None,
        uplink_latency_s=switch.uplink.latency_s if switch.uplink else 0.0,
    )
