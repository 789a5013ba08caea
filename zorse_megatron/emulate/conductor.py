"""Keeps one clock for all ranks: no rank learns of anything before its time. Without torch.

Every rank has a time of its own, which its computations move forward. What ranks have in common,
the links, is simulated by a `LinkClock`, and its clock may only go as far as the rank that is
furthest behind and still at work, since that one may post something next. So the result does not
depend on how fast this machine runs the ranks, nor in which order. (In the literature: conservative
parallel discrete-event simulation; SimGrid's SMPI runs real MPI programs in this way.)
"""

import contextlib
import math
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from zorse_megatron.emulate.link_clock import (
    Answer,
    Failure,
    Finish,
    LinkClock,
    LinkModel,
    Name,
    Operation,
    PostOperation,
    Request,
    Stream,
    Transfer,
    Wait,
)
from zorse_megatron.trace import HostClock


@dataclass(kw_only=True)
class _Rank:
    earliest_s: float = 0.0
    """It posts nothing before; infinite while it waits and after it has ended."""
    has_ended: bool = False
    waits_for: Name | None = None
    since_s: float = 0.0
    done: list[Name] = field(default_factory=list)
    """What it has not been told yet."""


class Conductor:
    """Takes requests in any order and hands out answers when their time has come."""

    def __init__(self, model: LinkModel) -> None:
        self.model = model
        self.clock = LinkClock(model.capacities_bytes_per_s)
        self.ranks = [_Rank() for _ in model.gpus]
        self._operations: dict[Name, Operation] = {}
        self._done: dict[Name, int] = {}
        """Operations that are done -> how many of their members have not been told."""
        self._failure: Failure | None = None

    def take(self, rank: int, request: Request) -> None:
        """Note a request of a rank. Mistakes in it are answered to all ranks."""
        state = self.ranks[rank]
        if isinstance(request, PostOperation):
            state.earliest_s = max(state.earliest_s, request.now_s)
            self._post(request)
        elif isinstance(request, Finish):
            state.earliest_s, state.has_ended = math.inf, True
        else:
            state.earliest_s, state.since_s = math.inf, request.now_s
            state.waits_for = request.name

    def answers(self) -> Iterator[tuple[int, Answer | Failure]]:
        """Move the clock as far as it can go, and yield who is to be answered."""
        yield from self._already_done()
        while self._failure is None and math.inf > self.clock.next_s <= self._horizon_s():
            for name in self.clock.step():
                self._note_done(name)
            yield from self._already_done()
        if self._failure is None and self._horizon_s() == math.inf and self._waiting():
            self._failure = Failure(reason=self._deadlock())
        if self._failure is not None:
            for rank in self._waiting():
                yield self._fail(rank)

    def gone(self, rank: int) -> None:
        """Note that a rank has ended without saying so: what the others wait for never comes."""
        if not self.ranks[rank].has_ended:
            self._failure = self._failure or Failure(reason=f"rank {rank} is gone")
            self.take(rank, Finish())

    def _horizon_s(self) -> float:
        return min((rank.earliest_s for rank in self.ranks), default=math.inf)

    def _waiting(self) -> list[int]:
        """Ranks that are owed an answer."""
        return [
            number
            for number, rank in enumerate(self.ranks)
            if rank.earliest_s == math.inf and not rank.has_ended
        ]

    def _already_done(self) -> Iterator[tuple[int, Answer]]:
        for number, rank in enumerate(self.ranks):
            if rank.waits_for is not None and rank.waits_for in self._done:
                yield number, self._answer(number, max(rank.since_s, self.clock.now_s))

    def _answer(self, number: int, now_s: float) -> Answer:
        rank = self.ranks[number]
        told, rank.done = tuple(rank.done), []
        rank.waits_for, rank.earliest_s = None, now_s
        for name in told:
            self._done[name] -= 1
            if not self._done[name]:
                del self._done[name]
        return Answer(now_s=now_s, done=told)

    def _note_done(self, name: Name) -> None:
        operation = self._operations.pop(name)
        self._done[name] = len(operation.ranks)
        for rank in operation.ranks:
            self.ranks[rank].done.append(name)

    def _post(self, request: PostOperation) -> None:
        known = self._operations.setdefault(request.name, request.operation)
        if not isinstance(known, Transfer) and known != request.operation:
            self._failure = Failure(
                reason=f"the ranks of {request.name[0]} do not agree on operation "
                f"{request.name[1]}: found {known} and {request.operation}"
            )
            return
        self.clock.post(
            request.now_s,
            request.name,
            members=len(known.ranks),
            work=self.model.work(request.operation),
            after=request.after,
        )

    def _fail(self, number: int) -> tuple[int, Failure]:
        rank = self.ranks[number]
        rank.waits_for, rank.earliest_s = None, rank.since_s
        assert self._failure is not None
        return number, self._failure

    def _deadlock(self) -> str:
        lines = [
            f"rank {number} waits for {rank.waits_for} since {rank.since_s:.6f} s"
            for number, rank in enumerate(self.ranks)
            if rank.waits_for is not None
        ]
        return "all ranks wait for each other: " + "; ".join(lines)


# Connects the ranks of a job to their conductor, in a thread of the process that runs the job.


_CLOSE = -1
"""In place of a rank: the owner of the thread wants it to end."""


def call(address: str, rank: int) -> Connection:
    """Connect a rank to its conductor."""
    connection = Client(address, family="AF_UNIX")
    connection.send(rank)
    return connection


@contextlib.contextmanager
def conducted(model: LinkModel) -> Iterator[str]:
    """Conduct one job within the block, which gets the address for `call`."""
    with tempfile.TemporaryDirectory(prefix="zorse-emulate-") as directory:
        address = str(Path(directory, "conductor"))
        with Listener(address, family="AF_UNIX", backlog=len(model.gpus) + 1) as listener:
            thread = threading.Thread(
                target=_serve, args=(listener, Conductor(model)), name="conductor", daemon=True
            )
            thread.start()
            try:
                yield address
            finally:
                with contextlib.suppress(OSError):
                    call(address, _CLOSE).close()
                thread.join()


def _serve(listener: Listener, conductor: Conductor) -> None:
    """Let all ranks call, then take their requests until they have ended."""
    connections: dict[Any, int] = {}
    while len(connections) < len(conductor.ranks):
        connection = listener.accept()
        rank = connection.recv()
        if rank == _CLOSE:
            return
        connections[connection] = rank
    by_rank = {rank: connection for connection, rank in connections.items()}
    while connections:
        for ready in wait(list(connections)):
            _listen(ready, connections, conductor)
        for rank, answer in conductor.answers():
            with contextlib.suppress(OSError):  # it has ended since; `gone` follows
                by_rank[rank].send(answer)


def _listen(connection: Any, connections: dict[Any, int], conductor: Conductor) -> None:
    """Take all that one rank has said."""
    rank = connections[connection]
    try:
        while connection.poll():
            request: Request = connection.recv()
            conductor.take(rank, request)
            if isinstance(request, Finish):
                del connections[connection]
                return
    except (EOFError, OSError):
        del connections[connection]
        conductor.gone(rank)


# One rank's time: its computations move it forward, and so does what it waits for.


class EmulationFailed(RuntimeError):
    """The emulated cluster cannot proceed; the message says why."""


class RankClock:
    """This rank's time, and its side of the conversation with the conductor.

    Stands still at 0 until `start` is called: what ranks do before they train is not emulated.
    """

    def __init__(self, connection: Connection) -> None:
        self.now_s = 0.0
        self.is_running = False
        self._connection = connection
        self._lock = threading.RLock()
        self._done: set[Name] = set()
        self._counts: dict[tuple[Stream, bool], int] = {}

    def start(self) -> None:
        """Let time pass from now on; all ranks of the job do so at the same point of the run."""
        self.is_running = True

    def compute(self, seconds_s: float) -> None:
        """Let a computation take its time."""
        if self.is_running:
            self.now_s += seconds_s

    def until(self, moment_s: float) -> None:
        """Let time pass until a moment, if that has not come yet."""
        if self.is_running:
            self.now_s = max(self.now_s, moment_s)

    def post(
        self,
        stream: Stream,
        operation: Operation,
        *,
        receives: bool = False,
        after: Name | None = None,
    ) -> Name:
        """Take part in the stream's next operation, and go on.

        `after`: one of this rank's operations; it does not start before that is done.
        """
        with self._lock:
            number = self._counts.get((stream, receives), 0)
            self._counts[stream, receives] = number + 1
            name = stream, number
            self._connection.send(
                PostOperation(now_s=self.now_s, name=name, operation=operation, after=after)
            )
            return name

    def wait(self, name: Name) -> None:
        """Stop until an operation is done. Raises EmulationFailed where it never will be."""
        with self._lock:
            if name not in self._done:
                self._ask(name)
            self._done.discard(name)

    def finish(self) -> None:
        """Take part in nothing more; time stands still again."""
        self.is_running = False
        with contextlib.suppress(ConnectionError):
            self._connection.send(Finish())
        self._connection.close()

    def _ask(self, name: Name) -> None:
        self._connection.send(Wait(now_s=self.now_s, name=name))
        try:
            answer: Answer | Failure = self._connection.recv()
        except (EOFError, ConnectionError):
            answer = Failure(reason="the conductor has ended")
        if isinstance(answer, Failure):
            raise EmulationFailed(answer.reason)
        self._done.update(answer.done)
        self.now_s = answer.now_s


class EmulatedTime(HostClock):
    """The emulated cluster's time, as the runtime reads a device's."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        """Return the rank's time."""
        return self._clock.now_s
