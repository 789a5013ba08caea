"""Which rank of which plan each process is that torchrun has started.

torchrun's own numbers follow the order in which nodes came to its rendezvous. Ranks of a plan
follow the cluster file, so processes get new numbers, and meet where rank 0 of the plan is.
"""

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from multiprocessing.connection import wait
from typing import Any

from zorse_megatron.errors import LaunchError, Problem, ZorseError
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.launch.rank_environment import OUTCOME
from zorse_megatron.launch.replan import GivenUp, JobFiles, Replanner, Starts
from zorse_megatron.live.hub import NAMED_S
from zorse_megatron.live.listener import TOKEN_CHARACTERS, LineSocket, Listener
from zorse_megatron.log import say
from zorse_megatron.plan.spans import spans_of, spell

# All processes that torchrun starts tell the first one who they are, and hear what to do.
#
# Plain sockets: this comes before torch is imported. The first process listens at torchrun's
# MASTER_PORT, which nobody else uses yet (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives every round
# of the rendezvous a port of its own).


_RETRY_S = 0.2
_CONNECT_S = 10.0
_ANSWER_S = 10.0
_MOST_ANSWER_BYTES = 1 << 24

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
    token: str
    """See `token_of`."""
    is_one_node: bool = False


def token_of(run: str, secret: str) -> str:
    """What processes of one run know each other by: its name and, if there is one, its secret."""
    key = f"{len(run)}:{run}{secret}".encode("utf-8", "surrogateescape")
    return hashlib.sha256(key).hexdigest()[:TOKEN_CHARACTERS]


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
    `arrive_s`, `decide_s`: how long processes may take to arrive, and deciding. Who is missing is
    told after 25 s. Raises LaunchError where not all arrive, or one of them ends; what `decide`
    raises is raised in its process only.
    """
    if point.number == 0:
        return _host(point, me, decide, arrive_s)
    line = _connection(point, arrive_s)
    with contextlib.closing(line):
        line.send({"number": point.number, **asdict(me)})
        try:
            line.connection.settimeout(arrive_s + decide_s)
            answer = line.connection.makefile("rb").readline(_MOST_ANSWER_BYTES)
        except TimeoutError as error:
            raise _no_rendezvous(point, f"no answer ({error})") from error
        except OSError:
            answer = b""  # reset, where it was closed before all of it was read
    if not answer.endswith(b"\n"):
        raise _no_rendezvous(point, "no answer: the first process has ended, or has another token")
    return dict(json.loads(answer))


def _host(
    point: Rendezvous,
    me: Arrival,
    decide: Callable[[Sequence[Arrival]], Answers],
    arrive_s: float,
) -> Mapping[str, object]:
    with contextlib.ExitStack() as stack:
        try:
            listener = Listener(
                point.address, point.port, point.token, is_one_node=point.is_one_node
            )
        except (OSError, OverflowError) as error:
            raise _no_rendezvous(point, f"a port that cannot be used ({error})") from error
        stack.enter_context(contextlib.closing(listener))
        if listener.note:
            say(f"note: {listener.note}")
        host = _Host(point=point, me=me, listener=listener)
        stack.callback(host.close)
        answers = decide(host.arrivals(arrive_s))
        host.answer(answers)
    return answers[0]


class _Host:
    """The first process, which the others come to."""

    def __init__(self, *, point: Rendezvous, me: Arrival, listener: Listener) -> None:
        self._point = point
        self._me = me
        self._listener = listener
        self._arrived = {0: replace(me, address=point.address)}
        self._lines: dict[LineSocket, tuple[str, int | None]] = {}
        """Connection -> its address, and the number of the process once it has said it."""

    def arrivals(self, limit_s: float) -> list[Arrival]:
        """Wait for all, and return who they are by their numbers. Raises LaunchError."""
        began_s, is_told = time.monotonic(), limit_s <= NAMED_S
        while len(self._arrived) < self._point.size:
            waited_for: list[Any] = [*self._listener.sockets, *self._lines]
            wait(waited_for, _RETRY_S)
            now_s = time.monotonic()
            for line, address in self._listener.admitted(now_s):
                self._lines[line] = address, None
            for line in list(self._lines):
                self._hear(line)
            if len(self._arrived) < self._point.size and now_s - began_s > limit_s:
                raise _no_rendezvous(self._point, f"after {limit_s:g} s {self._missing()}")
            if not is_told and now_s - began_s > NAMED_S:
                is_told = True
                say(f"note: after {NAMED_S:g} s {self._missing()}; the others wait {limit_s:g} s")
        return [self._arrived[number] for number in range(self._point.size)]

    def answer(self, answers: Answers) -> None:
        """Tell each what it is to do."""
        for line, (_, number) in self._lines.items():
            if number is not None:
                text = json.dumps(dict(answers[number]))
                line.connection.settimeout(_ANSWER_S)
                with contextlib.suppress(OSError):  # it has ended: torchrun starts all again
                    line.connection.sendall(text.encode() + b"\n")

    def close(self) -> None:
        """End all connections."""
        for line in self._lines:
            line.close()

    def _hear(self, line: LineSocket) -> None:
        address, number = self._lines[line]
        for message in line.receive():
            if number is None and (found := _arrival(message, self._point.size)) is not None:
                number, arrival = found
                own = arrival.node == self._me.node
                self._arrived[number] = replace(
                    arrival, address=self._point.address if own else address
                )
                self._lines[line] = address, number
        if not line.is_open:
            del self._lines[line]
            if number is not None:
                node = self._arrived[number].node
                raise _no_rendezvous(self._point, f"process {number}, on {node}, has ended")

    def _missing(self) -> str:
        absent = set(range(self._point.size)) - self._arrived.keys()
        numbers = spell(spans_of(absent))
        are = f"processes {numbers} are" if len(absent) > 1 else f"process {numbers} is"
        nodes = ", ".join(dict.fromkeys(each.node for each in self._arrived.values()))
        return f"{are} missing, and there are some of {nodes}"


def _arrival(message: dict[str, Any], size: int) -> tuple[int, Arrival] | None:
    """What a process says of itself; None: this is none of the job's."""
    try:
        number, arrival = int(message.pop("number")), Arrival(**message)
    except (ValueError, TypeError, KeyError):
        return None
    return (number, arrival) if 0 < number < size else None


def _connection(point: Rendezvous, limit_s: float) -> LineSocket:
    """Wait until the first process listens."""
    began_s, is_told = time.monotonic(), limit_s <= NAMED_S
    while True:
        try:
            return LineSocket.connect(
                point.address, point.port, point.token, timeout_s=min(limit_s, _CONNECT_S)
            )
        except OSError as error:
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s:
                raise _no_rendezvous(point, str(error)) from error
            if not is_told and waited_s > NAMED_S:
                is_told = True
                where = f"{point.address}:{point.port}"
                say(f"note: the first process is not at {where} ({error})", on_each_node=True)
            time.sleep(_RETRY_S)


def _no_rendezvous(point: Rendezvous, found: str) -> LaunchError:
    return LaunchError.of(
        "the processes of this start did not meet",
        where=f"process {point.number} of {point.size}, at {point.address}:{point.port}",
        found=found,
        expected="all processes that torchrun has started to meet there",
        remedy="Look at what the first process says; torchrun starts all again, up to "
        "--max-restarts times. Ports between nodes have to be open, and ZORSE_TOKEN, if it is set, "
        "the same on all.",
    )


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
        if problems := list(_problems(cluster, arrivals)):
            raise LaunchError("torchrun has not started the ranks of the cluster file", problems)
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
    sizes = [len(node.gpu_kinds) for node in files.left.nodes]
    first_of = dict(zip(files.left.names, accumulate(sizes, initial=0), strict=False))
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
    }


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
        raise LaunchError.of(
            "nodes cannot take part",
            where=", ".join(nodes),
            found=found,
            expected="nodes that can all train together",
            remedy="They leave the job, and the others start again. Once it is mended, start "
            "torchrun on them again.",
        )
