"""Which rank of which plan each process is that torchrun has started.

torchrun's own numbers follow the order in which nodes came to its rendezvous. Ranks of a plan
follow the cluster file, so processes get new numbers, and meet where rank 0 of the plan is.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from zorse_megatron.errors import LaunchError, Problem, ZorseError
from zorse_megatron.launch.elastic.meeting import Answers, Arrival
from zorse_megatron.launch.elastic.replan import JobFiles, Replanner
from zorse_megatron.launch.elastic.starts import GivenUp, Starts
from zorse_megatron.launch.rank_environment import OUTCOME
from zorse_megatron.schema.cluster.cluster import Cluster

ERROR, LEAVES = "error", "leaves"


def answers_for(
    cluster: Cluster,
    replanner: Replanner,
    starts: Starts,
    arrivals: Sequence[Arrival],
    *,
    was_requeued: bool,
) -> Answers:
    """Return what each process is to do: `variables` for its environment, `plan` and `cluster`.

    Or, where they cannot train, `error`, for all of them; those whose nodes cannot take part, or
    all if the job is given up, get `leaves`: torchrun is to end there.
    """
    present = {arrival.node for arrival in arrivals}
    is_first = not was_requeued and not any(arrival.restarts for arrival in arrivals)
    leave: Collection[str] = ()
    try:
        starts.begin(sorted(present), is_first=is_first)
        _refuse(cluster, arrivals)
        leave = _without_gpus(cluster, arrivals)
        _refuse_leaving(leave, "fewer GPUs than in the cluster file (nvidia-smi -L)")
        files = replanner.files_for(present)
        leave = files.left.cut_off
        _refuse_leaving(leave, f"no link to {', '.join(files.left.names)}")
    except ZorseError as error:
        leave = present if isinstance(error, GivenUp) else leave
        return [{ERROR: str(error), LEAVES: arrival.node in leave} for arrival in arrivals]
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
                # Each agent counts its own failures, so that they differ; the store is a new one.
                "TORCHELASTIC_RESTART_COUNT": "0",
                OUTCOME: str(starts.outcome.absolute()),
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


def _without_gpus(cluster: Cluster, arrivals: Sequence[Arrival]) -> tuple[str, ...]:
    """Nodes of which a GPU is gone."""
    listed = {arrival.node: arrival.gpus for arrival in arrivals if arrival.gpus is not None}
    return tuple(
        node.name
        for node in cluster.nodes
        if listed.get(node.name, len(node.gpu_kinds)) < len(node.gpu_kinds)
    )


def _refuse_leaving(nodes: Collection[str], found: str) -> None:
    if nodes:
        problem = Problem(
            where=", ".join(nodes),
            found=found,
            expected="nodes that can all train together",
            remedy="They leave the job, and the others start again. Once it is mended, start "
            "torchrun on them again.",
        )
        raise LaunchError("nodes cannot take part", [problem])
