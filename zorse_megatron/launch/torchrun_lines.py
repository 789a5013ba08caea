"""The torchrun command of each node.

torchrun gives ranks out in the order of --node-rank, and a node as many as its --nproc-per-node
says: the numbers need not be equal (`_assign_worker_ranks` in torch's
`distributed/elastic/agent/server/api.py`, unless TORCH_ELASTIC_WORKER_IDENTICAL is set).
"""

import shlex
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zorse_megatron.inputs.cluster import Cluster, Node
from zorse_megatron.launch.training_command import TrainingCommand
from zorse_megatron.plan.spans import spell

DEFAULT_PORT = 29500
MAX_RESTARTS = 100
"""Of torchrun's; before that `zorse join` gives up a job that does not get further."""
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""A port of its own for each round, so that nobody meets those of an earlier one."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of an elastic job find each other."""

    name: str
    address: str | None
    """Of the node that keeps it; None: the first one of the cluster file."""
    port: int
    min_gpus: int


def torchrun_lines(
    cluster: Cluster,
    training: TrainingCommand,
    *,
    master_address: str | None,
    master_port: int,
) -> str:
    """Return a comment and a command for each node; `master_address`: of the first one.

    Left out it is the first node's name, and `localhost` where there is no other node to find it:
    then the name in the cluster file may be anybody's invention.
    """
    address = _address(cluster, master_address)
    return "\n".join(
        f"{_comment(node)}\n{_line(cluster, number, training, address, master_port)}\n"
        for number, node in enumerate(cluster.nodes)
    )


def elastic_torchrun_lines(
    cluster: Cluster, words: Sequence[str], *, rendezvous: Rendezvous
) -> str:
    """Return the same for nodes that may go and come; `words`: of the `zorse join` of each."""
    return "\n".join(
        f"{_comment(node)}\n{_elastic_line(cluster, node, words, rendezvous)}\n"
        for node in cluster.nodes
    )


def _elastic_line(
    cluster: Cluster, node: Node, words: Sequence[str], rendezvous: Rendezvous
) -> str:
    address = _address(cluster, rendezvous.address)
    line = [
        "torchrun",
        *("--nnodes", f"{fewest_nodes(cluster, rendezvous.min_gpus)}:{len(cluster.nodes)}"),
        *("--nproc-per-node", str(len(node.gpu_kinds)), "--max-restarts", str(MAX_RESTARTS)),
        *("--rdzv-backend", "c10d", "--rdzv-id", rendezvous.name),
        *("--rdzv-endpoint", f"{address}:{rendezvous.port}"),
        *("-m", "zorse_megatron", "join", *words),
    ]
    return shlex.join([*gpu_variables(node), OWN_STORES, *line])


def fewest_nodes(cluster: Cluster, min_gpus: int) -> int:
    """With fewer nodes than this there cannot be so many GPUs."""
    largest_first = sorted((len(node.gpu_kinds) for node in cluster.nodes), reverse=True)
    return 1 + bisect_left(list(accumulate(largest_first)), min_gpus)


def _address(cluster: Cluster, given: str | None) -> str:
    alone = len(cluster.nodes) == 1
    return given or ("localhost" if alone else cluster.nodes[0].name)


def _comment(node: Node) -> str:
    return f"# On {' '.join(node.name.split())}: {described(node)}"


def described(node: Node) -> str:
    """Ranks and GPUs of a node, for people."""
    kinds = dict.fromkeys(node.gpu_kinds)
    gpus = ", ".join(f"{node.gpu_kinds.count(kind)} {kind}" for kind in kinds)
    spelled = spell([(node.ranks.start, node.ranks.stop)])
    return f"{'rank' if len(node.ranks) == 1 else 'ranks'} {spelled}, {gpus}"


def _line(cluster: Cluster, number: int, training: TrainingCommand, address: str, port: int) -> str:
    node = cluster.nodes[number]
    words = [
        *(*gpu_variables(node), *training.variables, "torchrun"),
        *("--nnodes", str(len(cluster.nodes)), "--node-rank", str(number)),
        *("--nproc-per-node", str(len(node.gpu_kinds))),
        *("--master-addr", address, "--master-port", str(port)),
        *training.program,
    ]
    return shlex.join(words)


def gpu_variables(node: Node) -> Iterator[str]:
    """With these local ranks count GPUs as the cluster file does, and not the fastest one first."""
    yield "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    if node.gpu_numbers is not None:
        yield f"CUDA_VISIBLE_DEVICES={','.join(map(str, node.gpu_numbers))}"
