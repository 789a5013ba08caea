"""Clusters for tests of the topology: samples, and random ones."""

import dataclasses
from itertools import pairwise
from typing import Any

import networkx as nx
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from zorse_megatron.costs.topology import (
    CAPACITY,
    MeasuredNode,
    Topology,
    attachment,
    host,
    inner_graph,
    node_graph,
)
from zorse_megatron.gpus.gpu import LinkType
from zorse_megatron.inputs.cluster import Link, Nics, NodeLink, RegionLink, Switch

GB_PER_S = 1e9


def node(
    name: str,
    num_gpus: int = 4,
    *,
    kind: str = "A",
    link_type: LinkType = "nvswitch",
    link_bytes_per_s: float = 80 * GB_PER_S,
    link_latency_s: float = 4e-6,
    nic_bytes_per_s: float = 10 * GB_PER_S,
    nic_latency_s: float = 20e-6,
    num_nics: int = 1,
    **changes: Any,
) -> MeasuredNode:
    """A node like many: eight units of bandwidth inside for one outside."""
    values: dict[str, Any] = {
        "name": name,
        "first_rank": 0,
        "gpu_kinds": (kind,) * num_gpus,
        "link": NodeLink(
            type=link_type, bandwidth_bytes_per_s=link_bytes_per_s, latency_s=link_latency_s
        ),
        "nics": Nics(
            count=num_nics, bandwidth_bytes_per_s=nic_bytes_per_s, latency_s=nic_latency_s
        ),
        "host_link_bytes_per_s": 16 * GB_PER_S,
        "host_memory_bytes": None,
        "region": "region",
    }
    return MeasuredNode(**values | changes)


def switch(
    name: str,
    *,
    region: str = "region",
    uplink_to: str | None = None,
    uplink_bytes_per_s: float | None = None,
    uplink_latency_s: float = 0.0,
) -> Switch:
    """A switch, whose uplink never limits where it has no bandwidth."""
    uplink = None
    if uplink_bytes_per_s is not None:
        uplink = Link(bandwidth_bytes_per_s=uplink_bytes_per_s, latency_s=uplink_latency_s)
    return Switch(name=name, region=region, uplink_to=uplink_to, uplink=uplink)


def region_link(regions: tuple[str, str], bytes_per_s: float, latency_s: float) -> RegionLink:
    """What two regions share."""
    return RegionLink(regions=regions, bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s)


def two_regions() -> Topology:
    """Region west: switches leaf0 and leaf1 with two nodes each below a spine. East: two nodes."""
    leaves = [
        switch(
            f"leaf{i}",
            region="west",
            uplink_to="spine",
            uplink_bytes_per_s=12 * GB_PER_S,
            uplink_latency_s=1e-6,
        )
        for i in range(2)
    ]
    spine = switch("spine", region="west")
    west = [node(f"w{i}", region="west", switch=f"leaf{i // 2}") for i in range(4)]
    east = [node(f"e{i}", region="east", kind="B") for i in range(2)]
    link = region_link(("west", "east"), GB_PER_S, 0.03)
    return Topology.of((*west, *east), (*leaves, spine), (link,))


def many_nodes(num_nodes: int, num_gpus: int = 8, per_leaf: int = 16) -> Topology:
    """Nodes of four kinds on leaf switches below one core."""
    kinds = ("A", "B", "C", "D")
    nodes = tuple(
        node(
            f"n{i}",
            num_gpus,
            kind=kinds[i * len(kinds) // num_nodes],
            switch=f"leaf{i // per_leaf}",
        )
        for i in range(num_nodes)
    )
    names = dict.fromkeys(str(each.switch) for each in nodes)
    switches = tuple(
        switch(name, uplink_bytes_per_s=40 * GB_PER_S, uplink_latency_s=1e-6) for name in names
    )
    return Topology.of(nodes, switches)


_rates = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0]).map(lambda n: n * GB_PER_S)


@st.composite
def topologies(draw: DrawFn, max_nodes: int = 4, max_gpus: int = 8) -> Topology:
    """Random small clusters with switches, several NICs, and one to three regions."""
    regions = [f"r{i}" for i in range(draw(st.integers(1, 3)))]
    switches = [
        switch(
            f"s{i}",
            region=draw(st.sampled_from(regions)),
            uplink_bytes_per_s=draw(st.none() | _rates),
            uplink_latency_s=draw(st.sampled_from([0.0, 1e-6])),
        )
        for i in range(draw(st.integers(0, 2)))
    ]
    switches = [_below(draw, each, switches[:i]) for i, each in enumerate(switches)]
    nodes, spare = [], max_gpus
    for index in range(draw(st.integers(1, max_nodes))):
        if spare:
            nodes.append(_node(draw, index, spare, regions, switches))
            spare -= nodes[-1].num_gpus
    return Topology.of(nodes, switches, _links(draw, regions))


def _below(draw: DrawFn, lower: Switch, above: list[Switch]) -> Switch:
    names = [each.name for each in above if each.region == lower.region]
    return dataclasses.replace(lower, uplink_to=draw(st.sampled_from([None, *names])))


def _node(
    draw: DrawFn, index: int, spare: int, regions: list[str], switches: list[Switch]
) -> MeasuredNode:
    region = draw(st.sampled_from(regions))
    names = [each.name for each in switches if each.region == region]
    return node(
        f"n{index}",
        draw(st.integers(1, min(4, spare))),
        kind=draw(st.sampled_from("AB")),
        link_type=draw(st.sampled_from(["nvswitch", "nvlink", "pcie"])),
        link_bytes_per_s=draw(_rates),
        host_link_bytes_per_s=draw(_rates),
        nic_bytes_per_s=draw(_rates),
        num_nics=draw(st.integers(1, 3)),
        region=region,
        switch=draw(st.sampled_from([None, *names])),
    )


def _links(draw: DrawFn, regions: list[str]) -> tuple[RegionLink, ...]:
    """A chain, and sometimes the link that closes it to a circle."""
    pairs = list(pairwise(regions))
    if len(regions) == 3 and draw(st.booleans()):
        pairs.append((regions[0], regions[2]))
    latencies = st.sampled_from([0.01, 0.02, 0.05])
    return tuple(region_link(pair, draw(_rates), draw(latencies)) for pair in pairs)


def full_graph(spec: Topology) -> nx.Graph:
    """Everything down to single GPUs and NICs, each of which limits both of its sides."""
    graph = node_graph(spec)
    for index, owner in enumerate(spec.nodes):
        graph.remove_edge(host(index), attachment(owner))
        graph.update(inner_graph(spec, index))
        for number in range(owner.num_ports):
            nic, name = ("nic", (index, number)), f"{owner.name}/nic{number}"
            sides = ((host(index), 0.0, f"{name}-pcie"),)
            sides += ((attachment(owner), owner.nic_to_switch_latency_s, name),)
            for other, latency_s, edge in sides:
                rate = {CAPACITY: owner.port_bytes_per_s}
                graph.add_edge(nic, other, **rate, latency_s=latency_s, name=edge)
    return graph
