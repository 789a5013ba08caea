"""The rank of a process that srun started on a node of the cluster file."""

from collections.abc import Mapping

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.launch.rank_environment import LaunchedRank
from zorse_megatron.schema.cluster.cluster import Cluster, Node


def torch_environment(
    launched: LaunchedRank, environment: Mapping[str, str], cluster: Cluster | None
) -> dict[str, str]:
    """Return the variables that torch.distributed and Megatron lack; none under torchrun.

    Slurm numbers tasks in its own order of nodes. With `cluster`, whose nodes bear the names that
    Slurm has for them, a task takes the rank that the file has for its node and local number, so
    that the order does not matter; rank 0, and with it the job's store, is on the file's first
    node (MASTER_ADDR overrides its address). Raises LaunchError where the job's nodes are not
    those of the file.
    """
    if launched.launcher != "srun":
        return {}
    variables = launched.torch_environment()
    if cluster is None:
        return variables
    problems = _problems(launched, cluster)
    if problems:
        raise LaunchError("the job's nodes are not those of the cluster file", problems)
    node = node_called(cluster, launched.node)
    assert node is not None
    variables["RANK"] = str(node.first_rank + launched.local_rank)
    variables["MASTER_ADDR"] = environment.get("MASTER_ADDR") or cluster.nodes[0].name
    return variables


def node_called(cluster: Cluster, name: str) -> Node | None:
    """Return the node of that name, or of the same host name without its domain."""
    for spelling in (str, _host):
        for node in cluster.nodes:
            if spelling(node.name) == spelling(name):
                return node
    return None


def _host(name: str) -> str:
    return name.partition(".")[0]


def _problems(launched: LaunchedRank, cluster: Cluster) -> list[Problem]:
    problems = []
    if launched.world_size != cluster.world_size:
        problems.append(
            Problem(
                where="--zorse-cluster",
                found=f"{launched.world_size} tasks in this step of Slurm's",
                expected=f"{cluster.world_size}, one for each GPU of the cluster file",
                remedy="Write the batch script again with zorse launch.",
            )
        )
    node = node_called(cluster, launched.node)
    if node is None:
        problems.append(
            Problem(
                where="--zorse-cluster",
                found=f'this task on node "{launched.node}", which the file does not have',
                expected=f"one of {', '.join(node.name for node in cluster.nodes)}",
                remedy="Ask Slurm for these nodes (zorse launch --node-names does), or leave the "
                "flag out where any nodes of these kinds will do.",
            )
        )
    elif launched.local_rank >= len(node.gpu_kinds):
        problems.append(
            Problem(
                where="--zorse-cluster",
                found=f"task {launched.local_rank} of node {node.name} (counted from 0)",
                expected=f"{len(node.gpu_kinds)} tasks there, one for each GPU",
                remedy="Write the batch script again with zorse launch.",
            )
        )
    return problems
