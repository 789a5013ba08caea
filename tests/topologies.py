"""Clusters for tests of the topology: samples, and random ones."""

import dataclasses
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from zorse_megatron.topology.spec import NodeSpec, RegionLink, SwitchSpec, TopologySpec

GB_PER_S = 1e9


def node(name: str, num_gpus: int = 4, **changes: Any) -> NodeSpec:
    """A node like many: eight units of bandwidth inside for one outside."""
    kind = changes.pop("kind", "A")
    values: dict[str, Any] = {
        "name": name,
        "gpu_kinds": (kind,) * num_gpus,
        "intra_kind": "switch",
        "intra_bytes_per_s": 80 * GB_PER_S,
        "intra_latency_s": 4e-6,
        "host_link_bytes_per_s": 16 * GB_PER_S,
        "nic_bytes_per_s": 10 * GB_PER_S,
        "nic_latency_s": 20e-6,
    }
    return NodeSpec(**values | changes)


def two_regions() -> TopologySpec:
    """Region west: switches leaf0 and leaf1 with two nodes each below a spine. East: two nodes."""
    leaves = [
        SwitchSpec(
            name=f"leaf{i}",
            region="west",
            uplink="spine",
            uplink_bytes_per_s=12 * GB_PER_S,
            uplink_latency_s=1e-6,
        )
        for i in range(2)
    ]
    spine = SwitchSpec(name="spine", region="west")
    west = [node(f"w{i}", region="west", switch=f"leaf{i // 2}") for i in range(4)]
    east = [node(f"e{i}", region="east", kind="B") for i in range(2)]
    link = RegionLink(regions=("west", "east"), bytes_per_s=GB_PER_S, latency_s=0.03)
    return TopologySpec(nodes=(*west, *east), switches=(*leaves, spine), region_links=(link,))


def many_nodes(num_nodes: int, num_gpus: int = 8, per_leaf: int = 16) -> TopologySpec:
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
        SwitchSpec(name=name, uplink_bytes_per_s=40 * GB_PER_S, uplink_latency_s=1e-6)
        for name in names
    )
    return TopologySpec(nodes=nodes, switches=switches)


_rates = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0]).map(lambda n: n * GB_PER_S)


@st.composite
def topologies(draw: DrawFn, max_nodes: int = 4, max_gpus: int = 8) -> TopologySpec:
    """Random small clusters with switches, several NICs, and one to three regions."""
    regions = [f"r{i}" for i in range(draw(st.integers(1, 3)))]
    switches = [
        SwitchSpec(
            name=f"s{i}",
            region=draw(st.sampled_from(regions)),
            uplink_bytes_per_s=draw(st.none() | _rates),
            uplink_latency_s=draw(st.sampled_from([0.0, 1e-6])),
        )
        for i in range(draw(st.integers(0, 2)))
    ]
    switches = [_below(draw, switch, switches[:i]) for i, switch in enumerate(switches)]
    nodes, spare = [], max_gpus
    for index in range(draw(st.integers(1, max_nodes))):
        if spare:
            nodes.append(_node(draw, index, spare, regions, switches))
            spare -= nodes[-1].num_gpus
    return TopologySpec(
        nodes=tuple(nodes), switches=tuple(switches), region_links=_links(draw, regions)
    )


def _below(draw: DrawFn, switch: SwitchSpec, above: list[SwitchSpec]) -> SwitchSpec:
    names = [each.name for each in above if each.region == switch.region]
    return dataclasses.replace(switch, uplink=draw(st.sampled_from([None, *names])))


def _node(
    draw: DrawFn, index: int, spare: int, regions: list[str], switches: list[SwitchSpec]
) -> NodeSpec:
    region = draw(st.sampled_from(regions))
    names = [switch.name for switch in switches if switch.region == region]
    return node(
        f"n{index}",
        draw(st.integers(1, min(4, spare))),
        kind=draw(st.sampled_from("AB")),
        intra_kind=draw(st.sampled_from(["switch", "mesh", "pcie"])),
        intra_bytes_per_s=draw(_rates),
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
    return tuple(
        RegionLink(regions=pair, bytes_per_s=draw(_rates), latency_s=draw(latencies))
        for pair in pairs
    )
