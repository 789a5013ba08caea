"""The file of a cluster without some of its GPUs: entries that stay whole stay as they are written.

Kept GPUs keep their nodes' names and order, so their new ranks are in the order of the old ones.
"""

from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

import networkx as nx

from zorse_megatron.errors import ClusterError, Problem
from zorse_megatron.schema.cluster.cluster import Cluster, Node
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, dump_cluster, parse_cluster
from zorse_megatron.schema.cluster.short_forms import spelled_out
from zorse_megatron.schema.text.yaml_text import read_yaml

USED_GPUS = "Written by `zorse plan`: the GPUs that its plan uses."
"""How the comment begins in the cluster file beside a plan for some of the GPUs."""


def text_with_gpus(
    data: bytes, ranks: Collection[int], *, source: str = "cluster", header: str = ""
) -> str:
    """Return the text of a cluster file with the GPUs of `ranks` alone.

    `data`: the file of the whole cluster. `header`: lines of comment above it, without `#`.
    Raises ClusterError for a file with problems, for ranks it lacks, and where the regions that are
    left were joined only by way of one that is not.
    """
    cluster = parse_cluster(data, source=source)
    wanted = frozenset(ranks)
    _refuse(cluster, wanted, source)
    value, _, _ = read_yaml(data, source, CLUSTER_FILE)
    kept = [node for node in cluster.nodes if wanted.intersection(node.ranks)]
    content = dict(value) | {"nodes": list(_entries(value["nodes"], cluster, wanted))}
    _drop_unused(content, kept, cluster)
    comment = "".join(f"# {line}\n" for line in header.splitlines())
    text = dump_cluster(content)
    parse_cluster(text.encode(), source="the cluster file that was to be written")
    return comment + text


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
    graph = nx.Graph()
    graph.add_nodes_from(regions)
    graph.add_edges_from(
        link.regions for link in cluster.region_links if regions.issuperset(link.regions)
    )
    return not regions or nx.is_connected(graph)


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


def _entries(entries: list[Any], cluster: Cluster, wanted: frozenset[int]) -> Iterator[Any]:
    """Entries of `nodes`: as written where all of their GPUs stay, else one for each node."""
    nodes = iter(cluster.nodes)
    for entry in entries:
        written: dict[str, Any] = {"instance": entry} if isinstance(entry, str) else entry
        its = [next(nodes) for _ in range(written.get("count", 1))]
        if "name" in written and all(wanted.issuperset(node.ranks) for node in its):
            yield entry
            continue
        for node in its:
            if wanted.intersection(node.ranks):
                yield _entry(written, node, wanted)


def _entry(written: dict[str, Any], node: Node, wanted: frozenset[int]) -> dict[str, Any]:
    entry = {"name": node.name} | {k: v for k, v in written.items() if k not in {"name", "count"}}
    kinds = [kind for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True) if rank in wanted]
    if len(kinds) < len(node.gpu_kinds):
        entry["gpus"] = [f"{len(list(same))} x {kind}" for kind, same in groupby(kinds)]
    if set(kinds) != set(node.gpu_kinds):  # what was left out followed from all of its GPUs
        entry["link"] = {
            "type": node.link.type,
            "bandwidth": node.link.bandwidth_bytes_per_s,
            "latency": node.link.latency_s,
        }
        entry["host_link"] = node.host_link_bytes_per_s
    return entry


def _drop_unused(content: dict[str, Any], kept: list[Node], cluster: Cluster) -> None:
    """Remove switches and links of regions, and kinds of GPU, that nothing uses any more."""
    regions = {node.region for node in kept}
    above = {switch.name: switch.uplink_to for switch in cluster.switches}
    used: set[str] = set()
    for node in kept:
        name = node.switch
        while name is not None and name not in used:
            used.add(name)
            name = above[name]
    places = spelled_out(content).get("switches") or []
    _replace(
        content,
        "switches",
        [
            switch
            for switch, place in zip(content.get("switches") or [], places, strict=True)
            if place["name"] in used
        ],
    )
    links = content.get("between_regions") or []
    _replace(
        content,
        "between_regions",
        [
            each
            for each in links
            if len(regions) > 1 and regions.issuperset(each.get("regions") or ())
        ],
    )
    own = {kind for node in kept for kind in node.gpu_kinds}
    _replace(
        content,
        "gpu_kinds",
        [each for each in content.get("gpu_kinds") or [] if each["name"] in own],
    )


def _replace(content: dict[str, Any], key: str, entries: list[Any]) -> None:
    if entries:
        content[key] = entries
    else:
        content.pop(key, None)
