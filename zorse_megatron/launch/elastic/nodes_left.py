"""Which nodes of a cluster a job goes on with when others are lost."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import networkx as nx

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.schema.cluster.cluster import Cluster, Node


@dataclass(frozen=True, kw_only=True)
class NodesLeft:
    """Nodes to train on, and those that are not there or cannot take part."""

    nodes: tuple[Node, ...]
    """In the order of the cluster file, with their ranks in the whole cluster."""
    lost: tuple[str, ...]
    """Names of nodes that are not there."""
    cut_off: tuple[str, ...]
    """Names of nodes that are there, in regions without a link to the others that are left."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of their GPUs in the whole cluster."""
        return tuple(rank for node in self.nodes for rank in node.ranks)

    @property
    def names(self) -> tuple[str, ...]:
        """What they are called."""
        return tuple(node.name for node in self.nodes)


def nodes_left(cluster: Cluster, present: Collection[str]) -> NodesLeft:
    """Return the nodes to go on with, of those that are `present` (names of the cluster file).

    Where regions were joined only by way of one that is lost, it is the part with most GPUs, and
    of equal parts the first one in the file. There may be none.
    """
    there = [node for node in cluster.nodes if node.name in present]
    parts = list(_joined_parts(cluster, there))
    chosen = max(parts, key=_num_gpus, default=[])
    return NodesLeft(
        nodes=tuple(chosen),
        lost=tuple(node.name for node in cluster.nodes if node.name not in present),
        cut_off=tuple(node.name for node in there if node not in chosen),
    )


def refuse_too_few(
    cluster: Cluster, left: NodesLeft, *, min_gpus: int, saved: int | None, source: str
) -> None:
    """Raise LaunchError if the nodes left have fewer GPUs than the job is to have at least.

    `saved`: iteration of the newest checkpoint to resume from; None: there is none.
    """
    if len(left.ranks) >= max(1, min_gpus):
        return
    lacking = [f"without {', '.join(left.lost)}"] if left.lost else []
    if left.cut_off:
        lacking.append(f"with {', '.join(left.cut_off)} cut off")
    problem = Problem(
        where=source,
        found=f"{len(left.ranks)} of {cluster.world_size} GPUs ({', '.join(lacking)})",
        expected=f"at least {max(1, min_gpus)} (--min-gpus)",
        remedy=f"{what_is_saved(saved)} Submit the job again when more nodes are there, or with a "
        "smaller --min-gpus.",
    )
    raise LaunchError("too few GPUs are left", [problem])


def what_is_saved(iteration: int | None) -> str:
    """What training can go on from, in a sentence."""
    if iteration is None:
        return "No checkpoint has been saved."
    return f"The checkpoint of iteration {iteration} is complete."


def _joined_parts(cluster: Cluster, nodes: list[Node]) -> Iterator[list[Node]]:
    """The nodes by regions that links join, in the order of their first nodes."""
    regions = list(dict.fromkeys(node.region for node in nodes))
    graph = nx.Graph()
    graph.add_nodes_from(regions)
    graph.add_edges_from(
        link.regions for link in cluster.region_links if set(regions).issuperset(link.regions)
    )
    for part in nx.connected_components(graph):
        yield [node for node in nodes if node.region in part]


def _num_gpus(nodes: list[Node]) -> int:
    return sum(len(node.gpu_kinds) for node in nodes)
