"""Two jobs that take turns, step by step, on one machine: while one steps, the other is stopped.

What the machine's speed does from one second to the next then meets both alike, and threads of the
waiting job (gloo has one for each process group, which wakes every 10 ms) take nothing from the
other. POSIX signals, so not on Windows.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np

_WAIT_S = 0.001


class Board:
    """A file that ranks of both jobs and whoever lets them step have in memory."""

    def __init__(self, path: Path, *, jobs: int, ranks: int) -> None:
        shape = (jobs, ranks, 3)
        mode: Literal["r+", "w+"] = "r+" if path.exists() else "w+"
        self._cells = np.memmap(path, dtype=np.int64, mode=mode, shape=shape)
        self._pids, self._waiting, self._allowed = (self._cells[..., i] for i in range(3))

    def wait_for_turn(self, job: int, rank: int) -> None:
        """Of a rank, between two steps: tell that the last one has ended and wait."""
        self._pids[job, rank] = os.getpid()
        self._waiting[job, rank] += 1
        while self._allowed[job, rank] < self._waiting[job, rank]:
            time.sleep(_WAIT_S)

    def let_step(self, job: int, has_ended: Callable[[], bool]) -> None:
        """Let the ranks of a job make one step, and stop them when all have."""
        self._signal(job, signal.SIGCONT)
        self._allowed[job] += 1
        self.await_ranks(job, has_ended)
        self._signal(job, signal.SIGSTOP)

    def await_ranks(self, job: int, has_ended: Callable[[], bool]) -> None:
        """Return when all ranks of a job wait for their turn, or when it has ended."""
        while (self._waiting[job] <= self._allowed[job]).any() and not has_ended():
            time.sleep(_WAIT_S)

    def let_end(self, job: int) -> None:
        """Let a job run to its end, if it has not ended."""
        self._allowed[job] = np.iinfo(np.int64).max
        self._signal(job, signal.SIGCONT)

    def _signal(self, job: int, number: int) -> None:
        for pid in filter(None, self._pids[job]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), number)
