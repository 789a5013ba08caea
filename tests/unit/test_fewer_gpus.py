"""A cluster without some of its GPUs, and its file, against the whole cluster's topology."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import ClusterError
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import (
    dump_cluster,
    joined_without,
    load_cluster,
    nodes_without,
    parse_cluster,
    with_gpus,
)

SITES = b"""
gpu_kinds:
  - {name: half, like: A100-40, memory: 20GB}
  - {name: other, like: T4, memory: 8GB}
nodes:
  - {name: a, count: 3, gpus: 2 x half, nics: 100 Gb/s, switch: leaf, region: west}
  - {gpus: [1 x A100-40, 2 x T4], nics: 2 x 50 Gb/s, region: west, host_memory: 64GiB}
  - {instance: g5.12xlarge, region: east}
  - {name: far, gpus: 2 x other, gpu_numbers: [3, 1], nics: 10 Gb/s, region: north}
switches:
  - {name: leaf, region: west, uplink: {to: top, bandwidth: 200 Gb/s}}
  - {name: top, region: west, uplink: {bandwidth: 400 Gb/s}}
  - {name: unused, region: west}
between_regions:
  - {regions: [west, east], bandwidth: 5 Gb/s, latency: 20 ms}
  - {regions: [east, north], bandwidth: 1 Gb/s, latency: 60 ms}
"""
WHOLE = parse_cluster(SITES)


def reduced(whole: Cluster, ranks: set[int]) -> list[tuple[object, ...]]:
    """What each kept GPU is and is connected by."""
    return [
        (
            node.name,
            node.numbers[rank - node.first_rank],
            kind,
            whole.kinds[kind],
            node.link,
            node.nics,
            node.host_link_bytes_per_s,
            node.host_memory_bytes,
            node.region,
            node.switch,
        )
        for node in whole.nodes
        for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True)
        if rank in ranks
    ]


@given(ranks=st.sets(st.integers(0, WHOLE.world_size - 1), min_size=1))
def test_kept_gpus_are_as_they_were(ranks: set[int]) -> None:
    """Kind, node, links, region and switch of each; links between regions that are left."""
    if not joined_without(WHOLE, ranks):
        with pytest.raises(ClusterError, match="by way of one that is left out"):
            with_gpus(WHOLE, ranks)
        return
    fewer = parse_cluster(dump_cluster(with_gpus(WHOLE, ranks), "Fewer.\nOf them.").encode())
    assert reduced(fewer, set(range(fewer.world_size))) == reduced(WHOLE, ranks)
    regions = set(fewer.regions)
    assert set(fewer.region_links) == {
        link for link in WHOLE.region_links if regions.issuperset(link.regions)
    }
    above = {switch.name: switch for switch in WHOLE.switches}
    assert {"leaf", "top"}.intersection(each.name for each in fewer.switches) == (
        {"leaf", "top"} if any(node.switch for node in fewer.nodes) else set()
    )
    assert all(above[switch.name] == switch for switch in fewer.switches)


@pytest.mark.parametrize(
    "path", sorted(Path("examples").glob("*.yaml")), ids=lambda path: path.stem
)
def test_what_is_written_loads_to_an_equal_cluster(path: Path) -> None:
    whole = load_cluster(path)
    assert parse_cluster(dump_cluster(whole).encode()) == whole


OWN_KINDS = """
  - {name: full, memory: 1.5GB, memory_bandwidth: 3 GB/s, 
     peak: {float32: 1 TFLOP/s, tf32: 2 TFLOP/s}}
  - {name: T4, memory: 8GB}
  - {name: as it is, like: a100 40}
  - {name: its size, like: A100-40, memory: 40GB, attention: unfused}
"""


@pytest.mark.parametrize(
    "text",
    [
        SITES.decode(),
        "nodes: [{gpus: 1 x T4}]",
        "{name: '1e9', nodes: [{name: 'yes', gpus: T4, nics: 1 Gb/s}, {name: '1e3', gpus: 2 x L4, "
        "nics: {count: 3, bandwidth: 7 Gb/s, latency: 0 s}, link: NVLink 33.3 GB/s}]}",
        "nodes: [{gpus: [2 x full, T4, as it is, its size, L4], host_memory: 1TB}]\n"
        "gpu_kinds:" + OWN_KINDS,
        "nodes: [{gpus: T4, region: ü}]",
    ],
)
def test_kinds_and_names_are_written_as_they_are(text: str) -> None:
    """Also those that YAML would take for numbers, and figures that no unit spells."""
    whole = parse_cluster(text.encode())
    assert parse_cluster(dump_cluster(whole, "Two\nlines.").encode()) == whole


def test_unknown_nodes_and_ranks_are_refused() -> None:
    """Nodes are named as `count` numbers them."""
    assert nodes_without(WHOLE, ["a-1", "far"], source="--without") == (0, 1, 4, 5, *range(6, 13))
    with pytest.raises(ClusterError, match="no node a, b"):
        nodes_without(WHOLE, ["a", "b", "a-0"], source="--without")
    with pytest.raises(ClusterError, match=r"ranks \[15, 99\]"):
        with_gpus(WHOLE, [0, 15, 99])
    with pytest.raises(ClusterError, match="no ranks"):
        with_gpus(WHOLE, [])
