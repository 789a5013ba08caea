"""Which nodes a Slurm job asks for together: the components of a heterogeneous job."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.schema.cluster.cluster import Cluster, Node
from zorse_megatron.schema.text.suggest import did_you_mean

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class JobComponent:
    """Nodes that follow each other in the cluster file and are alike: either may be the other."""

    partition: str | None
    """Slurm's partition; None: the site's default."""
    nodes: tuple[Node, ...]

    @property
    def gpus_per_node(self) -> int:
        """GPUs, and ranks, of each of its nodes."""
        return len(self.nodes[0].gpu_kinds)

    @property
    def ranks(self) -> range:
        """The global ranks of its GPUs."""
        return range(self.nodes[0].first_rank, self.nodes[-1].ranks.stop)


def components_of(cluster: Cluster, partitions: Mapping[str, str]) -> tuple[JobComponent, ...]:
    """Cut the cluster into components, in the order of its ranks.

    `partitions`: name of a node or kind of a node's first GPU -> partition; the name of a node
    comes first, and "" stands for all others. Slurm deals tasks out component by component, so
    that ranks land on the right kinds of GPU whichever nodes it picks. Raises LaunchError for a
    key that is neither a node nor a kind of the cluster.
    """
    known = {"", *(node.name for node in cluster.nodes), *cluster.gpu_kinds}
    problems = [_unknown(key, known) for key in partitions if key not in known]
    if problems:
        raise LaunchError("the partitions do not fit the cluster", problems)

    def likeness(node: Node) -> tuple[str | None, Node]:
        return _partition_of(node, partitions), dataclasses.replace(node, name="", first_rank=0)

    return tuple(
        JobComponent(partition=alike[0], nodes=tuple(nodes))
        for alike, nodes in groupby(cluster.nodes, likeness)
    )


def refuse_odd_names(cluster: Cluster) -> None:
    """Raise LaunchError for nodes whose names Slurm would read as something else, or not at all."""
    problems = [
        Problem(
            where="--node-names",
            found=f"a node named {node.name!r} in the cluster file",
            expected="the name that Slurm has for it: letters, digits, dots, dashes, underscores",
            remedy="Name the nodes as sinfo -N does, or leave --node-names out.",
        )
        for node in cluster.nodes
        if not _HOST_NAME.fullmatch(node.name)
    ]
    if problems:
        raise LaunchError("the nodes cannot be asked for by name", problems)


def _partition_of(node: Node, partitions: Mapping[str, str]) -> str | None:
    _, first = min(zip(node.numbers, node.gpu_kinds, strict=True))
    for key in (node.name, first, ""):
        if key in partitions:
            return partitions[key]
    return None


def _unknown(key: str, known: set[str]) -> Problem:
    return Problem(
        where="--partition",
        found=f'"{key}"',
        expected="a kind of GPU or a node of the cluster",
        remedy=did_you_mean(key, known - {""}),
    )
