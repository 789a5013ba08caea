"""Notices that a rank is gone, says which, and stops this rank: no job hangs without a word.

Each rank counts up a key of its own in the job's store and reads those of all others, in a thread
of its own, so that it goes on while the main thread waits for data that will never come. A rank
that fails says so in the store. Whoever misses a rank prints one line and ends its process.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

from zorse_megatron.errors import ZorseError

LOST_RANK = 3
"""Exit status of a rank that stops because another one is gone."""

_BEATS_PER_TIMEOUT = 12
_LONGEST_INTERVAL_S = 5.0
# Half of the timeout to notice, so that every rank has ended when all of it has passed.
_SILENCE_OF_TIMEOUT = 0.5
_DONE = "done"
_FAILED = "failed:"
_EXITED = "exited:"
_LOST_CONTACT = "lost contact"
_LONGEST_REASON = 600
# These ranks need not beat any more, and it is not they who are to blame.
_EXCUSED = (_DONE, _LOST_CONTACT)


@dataclass(frozen=True, kw_only=True)
class LostRank:
    """A rank that is gone, and what is known about it."""

    rank: int
    reason: str


class Heartbeat:
    """Tells the other ranks that this one is alive, and watches them."""

    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        describe: Callable[[int], str],
        stop_process: Callable[[str], None] | None = None,
    ) -> None:
        """`store`: a connection that nothing else uses; `describe`: names a rank for people.

        `stop_process` gets the line to print; by default it prints it and ends the process.
        """
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.interval_s = min(timeout_s / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL_S)
        self.silence_s = timeout_s * _SILENCE_OF_TIMEOUT
        self.timeout_s = timeout_s
        self.describe = describe
        self.stop_process = stop_process or _end_process
        self.stopping = threading.Event()
        self.last_seen: dict[int, tuple[bytes, float]] = {}
        self.thread = threading.Thread(target=self._run, name="zorse-heartbeat", daemon=True)

    def start(self) -> None:
        """Start to beat; a collective call, as a key must exist before it can be read."""
        self._publish("0")
        dist.barrier()
        self.thread.start()

    def finish(self) -> None:
        """This rank has done all its work; the others need not miss it."""
        self._end(_DONE)

    def fail(self, error: BaseException) -> None:
        """This rank has failed by its own fault; the others are told why."""
        self._end(f"{_FAILED}{type(error).__name__}: {_in_one_line(error)}")

    def exit(self, status: object) -> None:
        """This rank ends on request (`sys.exit`), as a rule together with all others."""
        self._end(f"{_EXITED}{status}" if status else _DONE)

    def blame(self, error: BaseException) -> NoReturn:
        """Communication failed: wait until the rank at fault is known, or give up and raise."""
        self.thread.join(timeout=self.silence_s + 2 * self.interval_s)
        self._end(_LOST_CONTACT)
        raise error

    def _end(self, word: str) -> None:
        self.stopping.set()
        self.thread.join(timeout=self.interval_s)
        try:
            self._publish(word)
        except dist.DistError:
            return  # the store has ended with its host; nobody is left to be told
        if word not in _EXCUSED:
            self._let_others_read()

    def _let_others_read(self) -> None:
        """Keep the store, which usually lives in rank 0, until the others have seen why."""
        if self.rank == 0:
            time.sleep(2 * self.interval_s)

    def _run(self) -> None:
        beats = 0
        while not self.stopping.wait(self.interval_s):
            beats += 1
            try:
                loss = self._beat(beats)
            except (dist.DistError, RuntimeError) as error:
                if not self.stopping.is_set():
                    self.stop_process(
                        f"the job's store, on the host of rank 0, does not answer ({error}): "
                        f"rank {self.rank} stops"
                    )
                return
            if loss is not None and not self.stopping.is_set():
                self._let_others_read()
                self.stop_process(
                    f"{self.describe(loss.rank)} {loss.reason}: rank {self.rank} stops"
                )
                return

    def _beat(self, beats: int) -> LostRank | None:
        """Beat and look for a lost rank; try once more if the store does not answer."""
        try:
            self._publish(str(beats))
            return self._find_lost()
        except (dist.DistError, RuntimeError):
            if self.stopping.wait(self.interval_s):
                return None
            self._publish(str(beats))
            return self._find_lost()

    def _find_lost(self) -> LostRank | None:
        now_s = time.monotonic()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        values = self.store.multi_get([_key(rank) for rank in others])
        silent = []
        for rank, value in zip(others, values, strict=True):
            word = value.decode()
            if word.startswith(_FAILED):
                return LostRank(rank=rank, reason=f"failed ({word.removeprefix(_FAILED)})")
            seen, since_s = self.last_seen.get(rank, (b"", now_s))
            if seen != value:
                self.last_seen[rank] = (value, now_s)
            elif word.startswith(_EXITED) and now_s - since_s > 2 * self.interval_s:
                # It did not leave together with this rank.
                status = word.removeprefix(_EXITED)
                return LostRank(rank=rank, reason=f"has exited with status {status}")
            elif word not in _EXCUSED and now_s - since_s > self.silence_s:
                silent.append(
                    LostRank(rank=rank, reason=f"has been silent for {now_s - since_s:.0f} s")
                )
        return silent[0] if silent else None

    def _publish(self, word: str) -> None:
        self.store.set(_key(self.rank), word)


def _in_one_line(error: BaseException) -> str:
    """What other ranks are told: the first line, or of our own errors the first problem."""
    if isinstance(error, ZorseError):
        return f"{error.title}: {error.problems[0]}"[:_LONGEST_REASON]
    return next(iter(str(error).splitlines()), "")[:_LONGEST_REASON]


def _key(rank: int) -> str:
    return f"zorse/alive/{rank}"


def _end_process(line: str) -> None:
    print(f"zorse: error: {line}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    # The main thread is inside a collective that cannot be interrupted.
    os._exit(LOST_RANK)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached (gloo, NCCL or the store)."""
    text = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text or "peer" in text)
    )
