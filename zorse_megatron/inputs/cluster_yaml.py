"""Reading and writing `cluster.yaml`; a cluster without some of its GPUs."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from zorse_megatron.errors import ClusterError, Problem
from zorse_megatron.files.json_text import layout
from zorse_megatron.files.strict import FileKind, built, read_file
from zorse_megatron.files.yaml_text import read_yaml
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster import Cluster, Link, Nics, Node, Switch, resolved
from zorse_megatron.inputs.cluster_file import ClusterFile, PeakEntry, spelled_out
from zorse_megatron.inputs.cluster_rules import problems_of

CLUSTER_FILE = FileKind(
    name="cluster",
    syntax="YAML",
    document="docs/cluster-file.md",
    error=ClusterError,
    root=ClusterFile,
    removed={"price_per_gpu_hour": "Prices are not counted: plan for the GPUs that you pay for."},
)


def load_cluster(path: str | Path) -> Cluster:
    """Read, check and return the cluster in a file. Raises ClusterError with every problem."""
    return parse_cluster(read_file(path, CLUSTER_FILE), source=str(path))


def parse_cluster(data: bytes, *, source: str = "cluster") -> Cluster:
    """Check and return the cluster in `data`; Problems call it `source`. Raises ClusterError."""
    value, lines, problems = read_yaml(data, source, CLUSTER_FILE)
    file: ClusterFile = built(
        spelled_out(value), problems, CLUSTER_FILE, source, rules=problems_of, lines=lines
    )
    return resolved(file)


def dump_cluster(cluster: Cluster, header: str = "") -> str:
    """Return the text of a file that loads to an equal cluster, with nothing left out.

    `header`: lines of comment above it, without `#`.
    """
    content = {
        "name": cluster.name,
        "gpu_kinds": [
            _kind(kind) for name, kind in cluster.kinds.items() if GPU_KINDS.get(name) != kind
        ],
        "nodes": [_node(node) for node in cluster.nodes],
        "switches": [_switch(switch) for switch in cluster.switches],
        "between_regions": [
            {"regions": list(link.regions), **_line(link)} for link in cluster.region_links
        ],
    }
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    return comment + layout(_given(content)) + "\n"


def _kind(kind: GpuKind) -> dict[str, Any]:
    return _given(
        {
            "name": kind.name,
            "like": kind.like,
            # Of a well-known kind the file says who saw it, where its own word stays.
            "memory": None if kind.memory_source else kind.memory_bytes,
            "memory_bandwidth": kind.memory_bytes_per_s,
            "peak": _given(
                {
                    field.name: getattr(kind.peak, f"{field.name}_flops_per_s")
                    for field in dataclasses.fields(PeakEntry)
                }
            ),
            "attention": kind.attention,
        }
    )


def _node(node: Node) -> dict[str, Any]:
    gpus = [{"kind": kind, "count": len(list(same))} for kind, same in groupby(node.gpu_kinds)]
    return _given(
        {
            "name": node.name,
            "gpus": gpus,
            "gpu_numbers": node.gpu_numbers and list(node.gpu_numbers),
            "link": {"type": node.link.type, **_line(node.link)},
            "nics": {"count": node.nics.count, **_line(node.nics)} if node.nics else None,
            "host_link": node.host_link_bytes_per_s,
            "host_memory": node.host_memory_bytes,
            "switch": node.switch,
            "region": node.region,
        }
    )


def _switch(switch: Switch) -> dict[str, Any]:
    uplink = _given({"to": switch.uplink_to, **_line(switch.uplink)}) if switch.uplink else None
    return _given({"name": switch.name, "region": switch.region, "uplink": uplink})


def _line(link: Link | Nics) -> dict[str, float]:
    return {"bandwidth": link.bandwidth_bytes_per_s, "latency": link.latency_s}


def _given(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value not in (None, [])}


# A cluster without some of its GPUs.
#
# Kept GPUs keep their nodes' names and order, so their new ranks are in the order of the old ones.


USED_GPUS = "Written by `zorse plan`: the GPUs that its plan uses."
"""How the comment begins in the cluster file beside a plan for some of the GPUs."""


def with_gpus(cluster: Cluster, ranks: Collection[int], *, source: str = "cluster") -> Cluster:
    """Return the cluster of the GPUs of `ranks` alone.

    Raises ClusterError for ranks it lacks, and where the regions that are left were joined only by
    way of one that is not.
    """
    wanted = frozenset(ranks)
    _refuse(cluster, wanted, source)
    nodes = tuple(_nodes(cluster, wanted))
    regions = {node.region for node in nodes}
    kinds = dict.fromkeys(kind for node in nodes for kind in node.gpu_kinds)
    switches = _switches_above(cluster, nodes)
    return replace(
        cluster,
        kinds={kind: cluster.kinds[kind] for kind in kinds},
        nodes=nodes,
        switches=tuple(each for each in cluster.switches if each.name in switches),
        region_links=tuple(
            each for each in cluster.region_links if regions.issuperset(each.regions)
        ),
    )


def nodes_without(cluster: Cluster, names: Collection[str], *, source: str) -> tuple[int, ...]:
    """Return the ranks of all nodes but those of these names. Raises ClusterError for unknown."""
    known = {node.name for node in cluster.nodes}
    unknown = sorted(set(names) - known)
    if unknown:
        problem = Problem(
            where=source,
            found=f"no node {', '.join(unknown)}",
            expected=f"nodes of the cluster: {', '.join(node.name for node in cluster.nodes[:16])}",
            remedy="Use the names that the cluster file has, with the numbers that count gives.",
        )
        raise ClusterError("a node is not in the cluster", [problem])
    return tuple(rank for node in cluster.nodes if node.name not in names for rank in node.ranks)


def joined_without(cluster: Cluster, ranks: Collection[int]) -> bool:
    """Whether the regions of these ranks are joined by links of their own."""
    wanted = frozenset(ranks)
    regions = {node.region for node in cluster.nodes if wanted.intersection(node.ranks)}
    return len(cluster.joined_regions(regions)) <= 1


def _refuse(cluster: Cluster, wanted: frozenset[int], source: str) -> None:
    problems = []
    strange = sorted(wanted - set(range(cluster.world_size)))
    if strange or not wanted:
        problems.append(
            Problem(
                where=source,
                found=f"ranks {strange}" if strange else "no ranks",
                expected=f"ranks from 0 to {cluster.world_size - 1}",
                remedy="Choose at least one GPU of the cluster.",
            )
        )
    elif not joined_without(cluster, wanted):
        problems.append(
            Problem(
                where=f"{source}: between_regions",
                found="regions that are joined only by way of one that is left out",
                expected="a link between those that stay",
                remedy="Add the link that they have without it.",
            )
        )
    if problems:
        raise ClusterError("there is no such cluster", problems)


def _nodes(cluster: Cluster, wanted: frozenset[int]) -> Iterator[Node]:
    first_rank = 0
    for node in cluster.nodes:
        kept = [rank for rank in node.ranks if rank in wanted]
        if kept:
            yield node.with_gpus(kept, first_rank=first_rank)
            first_rank += len(kept)


def _switches_above(cluster: Cluster, nodes: Iterable[Node]) -> set[str]:
    above = {switch.name: switch.uplink_to for switch in cluster.switches}
    used: set[str] = set()
    for node in nodes:
        name = node.switch
        while name is not None and name not in used:
            used.add(name)
            name = above[name]
    return used
