"""One rank's time: its computations move it forward, and so does what it waits for."""

import contextlib
import threading
from multiprocessing.connection import Connection

from zorse_megatron.emulate.link_clock import (
    Answer,
    Failure,
    Finish,
    Name,
    Operation,
    PostOperation,
    Request,
    Stream,
    Wait,
)
from zorse_megatron.trace import HostClock


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
            self._send(PostOperation(now_s=self.now_s, name=name, operation=operation, after=after))
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
            self._send(Finish())
        self._connection.close()

    def _ask(self, name: Name) -> None:
        self._send(Wait(now_s=self.now_s, name=name))
        try:
            answer: Answer | Failure = self._connection.recv()
        except (EOFError, ConnectionError):
            answer = Failure(reason="the conductor has ended")
        if isinstance(answer, Failure):
            raise EmulationFailed(answer.reason)
        self._done.update(answer.done)
        self.now_s = answer.now_s

    def _send(self, request: Request) -> None:
        self._connection.send(request)


class EmulatedTime(HostClock):
    """The emulated cluster's time, as the runtime reads a device's."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        """Return the rank's time."""
        return self._clock.now_s
