"""Which rank of which plan each process is that torchrun has started.

torchrun's own numbers follow the order in which nodes came to its rendezvous. Ranks of a plan
follow the cluster file, so processes get new numbers, and meet where rank 0 of the plan is.
"""

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from zorse_megatron.errors import LaunchError, Problem, ZorseError
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.launch.elastic.replan import GivenUp, JobFiles, Replanner, Starts
from zorse_megatron.launch.rank_environment import OUTCOME

# All processes that torchrun starts tell the first one who they are, and hear what to do.
#
# Plain sockets: this comes before torch is imported. The first process listens at torchrun's
# MASTER_PORT, which nobody else uses yet (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives every round
# of the rendezvous a port of its own).


_RETRY_S = 0.2
_HELLO_S = 10.0
_ENCODING = "utf-8"

Answers = Sequence[Mapping[str, object]]
"""Number of a process, as torchrun counts them -> what it is to do."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One process of a start."""

    node: str
    local_rank: int
    free_port: int
    """On its node."""
    gpus: int | None = None
    """How many its node lists; None: not known."""
    restarts: int = 0
    """How often torchrun has started its node's processes again after a failure."""
    address: str = ""
    """Of its node, as the first process sees it; filled in there."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the processes of a start meet: torchrun's RANK, WORLD_SIZE, MASTER_ADDR and _PORT."""

    number: int
    size: int
    address: str
    port: int


def rendezvous(
    point: Rendezvous,
    me: Arrival,
    decide: Callable[[Sequence[Arrival]], Answers],
    *,
    arrive_s: float,
    decide_s: float,
) -> Mapping[str, object]:
    """Return what this process is to do, as the first one has decided for all of them.

    `decide`: is called in the first process, with the arrivals in the order of their numbers.
    `arrive_s`, `decide_s`: how long processes may take to arrive, and deciding. Raises LaunchError
    where not all arrive, or the first one ends; what `decide` raises is raised in its process only.
    """
    if point.number == 0:
        return _host(point, me, decide, arrive_s)
    with _connection(point, arrive_s) as connection:
        hello = json.dumps({"number": point.number, **asdict(me)})
        connection.settimeout(arrive_s + decide_s)
        try:
            connection.sendall(hello.encode(_ENCODING) + b"\n")
            line = connection.makefile("r", encoding=_ENCODING).readline()
        except OSError as error:
            raise _no_rendezvous(point, f"no answer ({error})") from error
    if not line.endswith("\n"):
        raise _no_rendezvous(point, "no answer: the first process has ended")
    return dict(json.loads(line))


def _host(
    point: Rendezvous,
    me: Arrival,
    decide: Callable[[Sequence[Arrival]], Answers],
    arrive_s: float,
) -> Mapping[str, object]:
    deadline_s = time.monotonic() + arrive_s
    with contextlib.ExitStack() as stack:
        try:
            listener = socket.create_server(("", point.port), backlog=point.size)
        except (OSError, OverflowError) as error:
            raise _no_rendezvous(point, f"a port that cannot be used ({error})") from error
        stack.enter_context(listener)
        arrived = {0: replace(me, address=point.address)}
        connections: dict[int, socket.socket] = {}
        while len(arrived) < point.size:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                connection, (host, *_) = listener.accept()
                stack.enter_context(connection)
                found = _hello(connection)
            except OSError as error:
                absent = point.size - len(arrived)
                raise _no_rendezvous(
                    point, f"{absent} processes not there after {arrive_s:g} s"
                ) from error
            if found is None or not 0 < found[0] < point.size:
                continue  # it ended as soon as it came, or is somebody else
            number, arrival = found
            address = point.address if arrival.node == me.node else host
            arrived[number] = replace(arrival, address=address)
            connections[number] = connection
        answers = decide([arrived[number] for number in range(point.size)])
        for number, connection in connections.items():
            with contextlib.suppress(OSError):  # it has ended: torchrun starts all again
                connection.sendall(json.dumps(dict(answers[number])).encode(_ENCODING) + b"\n")
    return answers[0]


def _hello(connection: socket.socket) -> tuple[int, Arrival] | None:
    """What a process says of itself; None: this is none of ours."""
    connection.settimeout(_HELLO_S)
    try:
        said = json.loads(connection.makefile("r", encoding=_ENCODING).readline())
        return int(said.pop("number")), Arrival(**said)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _connection(point: Rendezvous, limit_s: float) -> socket.socket:
    """Wait until the first process listens."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((point.address, point.port), timeout=limit_s)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise _no_rendezvous(point, str(error)) from error
            time.sleep(_RETRY_S)


def _no_rendezvous(point: Rendezvous, found: str) -> LaunchError:
    problem = Problem(
        where=f"process {point.number} of {point.size}, at {point.address}:{point.port}",
        found=found,
        expected="all processes that torchrun has started to meet there",
        remedy="Look at what the first process says; torchrun starts all again, up to "
        "--max-restarts times. Ports between nodes have to be open.",
    )
    return LaunchError("the processes of this start did not meet", [problem])


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
    return _ranks_for(arrivals, files, str(starts.outcome.absolute()))


def _ranks_for(arrivals: Sequence[Arrival], files: JobFiles, outcome: str) -> Answers:
    """Which rank each is, and of which plan. `outcome`: the file for how the job ends."""
    first_of = _first_ranks(files)
    ranks = [first_of[arrival.node] + arrival.local_rank for arrival in arrivals]
    first = arrivals[ranks.index(0)]
    return [
        {
            "variables": {
                **_place_of(rank, len(arrivals), first),
                OUTCOME: outcome,
            },
            "plan": str(files.plan),
            "cluster": str(files.cluster),
            "is_new": files.is_new,
            "without": list(files.left.lost),
        }
        for rank in ranks
    ]


def _place_of(rank: int, world_size: int, first: Arrival) -> dict[str, str]:
    """What torch reads, in place of what torchrun has set; `first`: the process of rank 0."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(first.free_port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Each agent counts its own failures, so that they differ; the store is a new one.
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


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
