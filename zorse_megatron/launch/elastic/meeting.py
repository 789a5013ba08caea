"""All processes that torchrun starts tell the first one who they are, and hear what to do.

Plain sockets: this comes before torch is imported. The first process listens at torchrun's
MASTER_PORT, which nobody else uses yet (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` gives every round of
the rendezvous a port of its own).
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from zorse_megatron.errors import LaunchError, Problem

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
class MeetingPoint:
    """Where the processes of a start meet: torchrun's RANK, WORLD_SIZE, MASTER_ADDR and _PORT."""

    number: int
    size: int
    address: str
    port: int


def meet(
    point: MeetingPoint,
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
            raise _no_meeting(point, f"no answer ({error})") from error
    if not line.endswith("\n"):
        raise _no_meeting(point, "no answer: the first process has ended")
    return dict(json.loads(line))


def _host(
    point: MeetingPoint,
    me: Arrival,
    decide: Callable[[Sequence[Arrival]], Answers],
    arrive_s: float,
) -> Mapping[str, object]:
    deadline_s = time.monotonic() + arrive_s
    with contextlib.ExitStack() as stack:
        try:
            listener = socket.create_server(("", point.port), backlog=point.size)
        except (OSError, OverflowError) as error:
            raise _no_meeting(point, f"a port that cannot be used ({error})") from error
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
                raise _no_meeting(
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


def _connection(point: MeetingPoint, limit_s: float) -> socket.socket:
    """Wait until the first process listens."""
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            return socket.create_connection((point.address, point.port), timeout=limit_s)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise _no_meeting(point, str(error)) from error
            time.sleep(_RETRY_S)


def _no_meeting(point: MeetingPoint, found: str) -> LaunchError:
    problem = Problem(
        where=f"process {point.number} of {point.size}, at {point.address}:{point.port}",
        found=found,
        expected="all processes that torchrun has started to meet there",
        remedy="Look at what the first process says; torchrun starts all again, up to "
        "--max-restarts times. Ports between nodes have to be open.",
    )
    return LaunchError("the processes of this start did not meet", [problem])
