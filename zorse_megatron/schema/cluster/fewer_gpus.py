"""A cluster without some of its GPUs.

Kept GPUs keep their nodes' names and order, so their new ranks are in the order of the old ones.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import networkx as nx

from zorse_megatron.errors import ClusterError, Problem
from zorse_megatron.schema.cluster.cluster import Cluster, Node

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


def _nodes(cluster: Cluster, wanted: frozenset[int]) -> Iterator[Node]:
    first_rank = 0
    for node in cluster.nodes:
        kept = [rank for rank in node.ranks if rank in wanted]
        if kept:
            kinds = tuple(node.gpu_kinds[rank - node.first_rank] for rank in kept)
            numbers = tuple(node.numbers[rank - node.first_rank] for rank in kept)
            yield replace(
                node,
                first_rank=first_rank,
                gpu_kinds=kinds,
                gpu_numbers=None if numbers == tuple(range(len(kept))) else numbers,
            )
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
