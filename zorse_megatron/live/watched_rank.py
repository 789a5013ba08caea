"""The rank's own end of the watch: it says what it does, and how it ends."""

import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from zorse_megatron.errors import ZorseError
from zorse_megatron.live.root_cause import FailureKind, Timeouts
from zorse_megatron.processes import end_with_parent

# Memory that a rank and its watcher share, so that the rank's last words outlive it.


_LENGTH = struct.Struct("<H")
_CAPACITY_BYTES = 2000


class SharedText:
    """A short text with one writer, in memory that survives a fork.

    There are two places, and a byte says which holds the text: a writer that dies while it writes
    leaves the text of before. A write takes about 2 microseconds.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 + 2 * (_LENGTH.size + _CAPACITY_BYTES))

    def write(self, text: str) -> None:
        """Replace the text; what does not fit is cut off."""
        data = text.encode(errors="replace")[:_CAPACITY_BYTES]
        slot = 1 - self._memory[0]
        start = self._start(slot)
        self._memory[start : start + len(data)] = data
        _LENGTH.pack_into(self._memory, start - _LENGTH.size, len(data))
        self._memory[0] = slot

    def read(self) -> str:
        """Return the text; empty before the first write."""
        start = self._start(self._memory[0])
        (length,) = _LENGTH.unpack_from(self._memory, start - _LENGTH.size)
        return bytes(self._memory[start : start + length]).decode(errors="ignore")

    @staticmethod
    def _start(slot: int) -> int:
        return 1 + slot * (_LENGTH.size + _CAPACITY_BYTES) + _LENGTH.size


class SharedState:
    """What a rank and its watcher tell each other."""

    def __init__(self) -> None:
        self.phase = SharedText()
        """By the rank: what it is doing."""
        self.exit_reason = SharedText()
        """By the rank: how it is about to end, see `root_cause.report_of_word`."""
        self.address = SharedText()
        """By the rank: where the watcher of rank 0 listens."""
        self._flags = mmap.mmap(-1, 3)

    @property
    def must_end(self) -> bool:
        """By the watcher: the rank has to end."""
        return self._flags[0] != 0

    def end(self) -> None:
        """Tell the rank to end."""
        self._flags[0] = 1

    @property
    def is_blamed(self) -> bool:
        """By the watcher: no other rank is at fault, and the rank may raise what it has."""
        return self._flags[2] != 0

    def blame(self) -> None:
        """Tell the rank that it is blamed."""
        self._flags[2] = 1

    @property
    def beat(self) -> int:
        """By the watcher: changes while it is alive."""
        return self._flags[1]

    def count_beat(self) -> None:
        """Show the rank that its watcher is alive."""
        self._flags[1] = (self._flags[1] + 1) % 256


LOST_RANK = 3
"""Exit status of a rank that ends because another one is gone."""

BAD_INPUT = 2
"""Exit status for input that cannot be used, as for argparse."""

ASKED_TO_END = 4
"""Exit status of an elastic job's rank that has saved and ended because a rank got SIGTERM."""
_LOOK_S = 0.1
_LONGEST_REASON = 600
_LIBRARIES = ("gloo", "NCCL", "Connection closed by peer", "Broken pipe")


class WatchedRank:
    """What a rank tells its watcher. Without a watcher, nobody hears it."""

    def __init__(self, shared: SharedState | None, timeouts: Timeouts) -> None:
        self.shared = shared
        self.timeouts = timeouts

    def enter(self, phase: str) -> None:
        """Say what this rank does from now on, as it reads after "was killed": "in a save"."""
        if self.shared is not None:
            self.shared.phase.write(phase)

    def join(self, address: str) -> None:
        """Say where the watcher of rank 0 listens: "host port password"."""
        if self.shared is not None:
            self.shared.address.write(address)

    def say(self, kind: FailureKind, why: str = "") -> None:
        """Say how this rank is about to end; `why`: what follows the rank's name in a sentence."""
        if self.shared is not None:
            self.shared.exit_reason.write(f"{kind.name}:{why}")

    def wait_for_the_end(self) -> None:
        """Wait for the one at fault to be named; returns if it is this rank itself."""
        until_s = time.monotonic() + self.timeouts.silence_s + 10
        # The listening thread ends the process if it is not.
        while self.shared is not None and not self.shared.is_blamed and time.monotonic() < until_s:
            time.sleep(_LOOK_S)

    @contextmanager
    def last_words(self, *, all_refuse: bool = True, is_early: bool = False) -> Iterator[None]:
        """Let the watcher know how the block ends.

        `all_refuse`: what one rank refuses is refused by all, unless the error says otherwise.
        `is_early`: the rank has not met the others, who have found nothing wrong if they wait.
        """
        try:
            yield
        except SystemExit as request:
            code = 0 if request.code is None else request.code
            status = code if isinstance(code, int) else 1
            is_well = status in (0, ASKED_TO_END)
            kind = FailureKind.EXITED_WELL if is_well else FailureKind.EXITED
            self.say(kind, f"has exited alone, with status {status},")
            raise
        except KeyboardInterrupt:
            self.say(FailureKind.ASKED_TO_END, "was ended by SIGINT")
            raise
        except ZorseError as error:
            alone = error.is_of_one_rank or not all_refuse
            refused = FailureKind.REFUSED_EARLY if is_early else FailureKind.REFUSED
            self.say(FailureKind.FAILED if alone else refused, _failed(error))
            raise
        except BaseException as error:
            if is_communication_error(error):
                lost = "lost contact to another rank, though every process is alive"
                self.say(FailureKind.LOST_CONTACT, f"{lost} ({in_one_line(error)})")
                self.wait_for_the_end()
            else:
                self.say(FailureKind.FAILED, _failed(error))
            raise
        self.enter("at its end")
        self.say(FailureKind.DONE)


def watch_parent(shared: SharedState, timeouts: Timeouts, parent: int) -> None:
    """In the new rank: end when the watcher says so, is gone, or stands still, which ends it."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(LOST_RANK)
    threading.Thread(
        target=_listen, args=(shared, timeouts, parent), name="watch", daemon=True
    ).start()


def _listen(shared: SharedState, timeouts: Timeouts, parent: int) -> None:
    beat, since_s, looked_s = shared.beat, time.monotonic(), time.monotonic()
    while True:
        time.sleep(_LOOK_S)
        now_s = time.monotonic()
        if shared.beat != beat or now_s - looked_s > 1:  # or this process has stood still, too
            beat, since_s = shared.beat, now_s
        looked_s = now_s
        stands_still = now_s - since_s > timeouts.silence_s + 10
        if stands_still and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)  # a launcher would wait for it for ever
        if shared.must_end or stands_still or os.getppid() != parent:
            sys.stdout.flush()
            sys.stderr.flush()
            # The main thread is inside a collective that cannot be interrupted.
            os._exit(LOST_RANK)


def is_communication_error(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached (gloo, NCCL or the store).

    By the names of torch's classes and by what the libraries write, as torch need not be there.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        names = {parent.__name__ for parent in type(cause).__mro__}
        text = str(cause)
        says_so = isinstance(cause, RuntimeError) and any(word in text for word in _LIBRARIES)
        if "DistError" in names or says_so:
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _failed(error: BaseException) -> str:
    return f"failed ({in_one_line(error)})"


def in_one_line(error: BaseException) -> str:
    """What others are told: the first line, or of our own errors the first problem."""
    if isinstance(error, ZorseError):
        return f"{type(error).__name__}: {error.title}: {error.problems[0]}"[:_LONGEST_REASON]
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:_LONGEST_REASON]
