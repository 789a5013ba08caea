"""Which rank of which plan each process is that torchrun has started.

torchrun's own numbers follow the order in which nodes came to its rendezvous. Ranks of a plan
follow the cluster file, so processes get new numbers, and meet where rank 0 of the plan is.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from zorse_megatron.errors import LaunchError, Problem, ZorseError
from zorse_megatron.launch.elastic.meeting import Answers, Arrival
from zorse_megatron.launch.elastic.replan import JobFiles, Replanner
from zorse_megatron.schema.cluster.cluster import Cluster

ERROR = "error"


def answers_for(cluster: Cluster, replanner: Replanner, arrivals: Sequence[Arrival]) -> Answers:
    """Return what each process is to do: `variables` for its environment, `plan` and `cluster`.

    Or, where they cannot train, `error`, for all of them.
    """
    try:
        _refuse(cluster, arrivals)
        files = replanner.files_for({arrival.node for arrival in arrivals})
        _refuse_cut_off(files)
    except ZorseError as error:
        return [{ERROR: str(error)}] * len(arrivals)
    first_of = _first_ranks(files)
    ranks = [first_of[arrival.node] + arrival.local_rank for arrival in arrivals]
    first = arrivals[ranks.index(0)]
    return [
        {
            "variables": {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(arrivals)),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(first.free_port),
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            },
            "plan": str(files.plan),
            "cluster": str(files.cluster),
            "is_new": files.is_new,
            "without": list(files.left.lost),
        }
        for rank in ranks
    ]


def _first_ranks(files: JobFiles) -> dict[str, int]:
    first, found = 0, {}
    for node in files.left.nodes:
        found[node.name] = first
        first += len(node.gpu_kinds)
    return found


def _refuse(cluster: Cluster, arrivals: Sequence[Arrival]) -> None:
    """Raise LaunchError where processes are not those of whole nodes of the cluster."""
    problems = list(_problems(cluster, arrivals))
    if problems:
        raise LaunchError("torchrun has not started the ranks of the cluster file", problems)


def _problems(cluster: Cluster, arrivals: Sequence[Arrival]) -> Iterator[Problem]:
    gpus = {node.name: len(node.gpu_kinds) for node in cluster.nodes}
    numbers: dict[str, set[int]] = {}
    for arrival in arrivals:
        numbers.setdefault(arrival.node, set()).add(arrival.local_rank)
    for node, count in Counter(arrival.node for arrival in arrivals).items():
        if node not in gpus:
            yield Problem(
                where=node,
                found="a node that the cluster file lacks",
                expected=f"one of {', '.join(gpus)}",
                remedy="Use host names in the cluster file, or set ZORSE_NODE_NAME on the node.",
            )
        elif count != gpus[node]:
            yield Problem(
                where=node,
                found=f"{count} processes",
                expected=f"{gpus[node]}, one for each of its GPUs in the cluster file",
                remedy="Start torchrun once on each node, with the command that zorse launch "
                "prints for it.",
            )
        elif numbers[node] != set(range(count)):
            yield Problem(
                where=node,
                found=f"{count} processes with local ranks {sorted(numbers[node])}",
                expected=f"each of 0 to {count - 1} once: those of one machine",
                remedy="Give each machine a ZORSE_NODE_NAME of its own.",
            )


def _refuse_cut_off(files: JobFiles) -> None:
    if files.left.cut_off:
        problem = Problem(
            where=", ".join(files.left.cut_off),
            found=f"no link to {', '.join(files.left.names)}, with {', '.join(files.left.lost)} "
            "lost",
            expected="one: torchrun has no way to leave out nodes that answer",
            remedy="Stop torchrun on the nodes that are cut off; the others go on.",
        )
        raise LaunchError("nodes are cut off", [problem])
