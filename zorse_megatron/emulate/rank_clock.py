"""One rank's time: its computations move it forward, and so does what it waits for."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from zorse_megatron.emulate.messages import (
    Answer,
    Collective,
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

_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 1000


class EmulationFailed(RuntimeError):
    """The emulated cluster cannot proceed; the message says why."""


class Pace:
    """Sleeps until a moment of the emulated cluster has come on this machine's clock, too.

    Deadlines are absolute, so that one late wake-up does not delay the next.
    """

    def __init__(
        self,
        dilation: float,
        *,
        now_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`dilation`: seconds on this machine for one second of the emulated cluster.

        `now_s`: what time it is there.
        """
        self.dilation = dilation
        self.late_s = 0.0
        """How far this machine was behind at most, in seconds of the emulated cluster."""
        self._clock, self._sleep = clock, sleep
        self._origin_s = clock() - now_s * dilation

    def until(self, now_s: float) -> None:
        """Return when `now_s` has come."""
        left_s = self._origin_s + now_s * self.dilation - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        else:
            self.late_s = max(self.late_s, -left_s / self.dilation)

    def elapsed_s(self) -> float:
        """This machine's time since the start, in seconds of the emulated cluster."""
        return (self._clock() - self._origin_s) / self.dilation


def wake_up_on_time() -> None:
    """Let this thread's sleeps end within a microsecond of their deadline, where Linux can."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)


class RankClock:
    """This rank's time, and its side of the conversation with the conductor.

    Stands still at 0 until `start` is called: what ranks do before they train is not emulated.
    """

    def __init__(
        self, connection: Connection, *, world_size: int, dilation: float | None = None
    ) -> None:
        """`dilation`: see `Pace`; None: go on as soon as the answer is known."""
        self.now_s = 0.0
        self.is_running = False
        self.pace: Pace | None = None
        self._dilation = dilation
        self._ranks = tuple(range(world_size))
        self._connection = connection
        self._lock = threading.RLock()
        self._done: set[Name] = set()
        self._counts: dict[tuple[Stream, bool], int] = {}

    def start(self) -> None:
        """Let time pass from now on; all ranks of the job do so at the same point of the run."""
        self.is_running = True
        if self._dilation is not None:
            wake_up_on_time()
            everybody = Collective(kind="all_reduce", ranks=self._ranks, part_bytes=(1,))
            self.wait(self.post(("start",), everybody))
            # Now, on every rank within a moment, it is the same time on the emulated cluster.
            self.pace = Pace(self._dilation, now_s=self.now_s)

    @property
    def measured_s(self) -> float:
        """What time it is, on this machine's clock where that is to keep pace."""
        return self.now_s if self.pace is None else self.pace.elapsed_s()

    def compute(self, seconds_s: float) -> None:
        """Let a computation take its time."""
        if self.is_running:
            self._go_to(self.now_s + seconds_s)

    def until(self, moment_s: float) -> None:
        """Let time pass until a moment, if that has not come yet."""
        if self.is_running and moment_s > self.now_s:
            self._go_to(moment_s)

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
        self._go_to(answer.now_s)

    def _send(self, request: Request) -> None:
        self._connection.send(request)

    def _go_to(self, now_s: float) -> None:
        self.now_s = now_s
        if self.pace is not None:
            self.pace.until(now_s)


class EmulatedTime(HostClock):
    """The emulated cluster's time, as the runtime reads a device's."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock

    def mark(self) -> float:
        """Return the rank's time."""
        return self._clock.now_s
