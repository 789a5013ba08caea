"""The parent process of one rank: reports how it ends, and ends it if necessary.

It does next to nothing, holds no lock of the rank's and needs neither torch nor the job's store, so
that it answers whatever the rank does: compiles, saves for minutes, holds Python's lock in a long
call of C's. Only how a process ends is taken as a sign, never that it is slow.
"""

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import NoReturn

from zorse_megatron.live.hub import Hub, Member
from zorse_megatron.live.root_cause import (
    FailureKind,
    Report,
    Timeouts,
    report_of_end,
    report_of_word,
)
from zorse_megatron.live.watched_rank import ASKED_TO_END, BAD_INPUT, LOST_RANK, SharedState

_TICK_S = 0.1
_GAP_S = 2.0
"""A loop that was away for so long was stopped, with all of the job or alone."""
_SURVIVOR_S = 2.0
_GUILTY_S = 5.0
"""How long a rank has to end by itself: a guilty one may still be writing its traceback."""
_HELPER_S = 120.0
_BAD_INPUT = (FailureKind.REFUSED, FailureKind.REFUSED_EARLY)
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE)
"""A terminal sends these to the rank, too."""


@dataclass(kw_only=True)
class Watcher:
    """Watches one rank to its end."""

    rank: int
    process: int
    shared: SharedState
    post: Hub | Member
    timeouts: Timeouts
    find_hub: Callable[[], int]
    """Starts a process that does so in place of a rank that has ended too soon."""
    passed_on: list[int]
    """Signals that a launcher has sent."""
    saved: Callable[[], str]
    """Says what training can go on from."""
    status: int | None = None
    own_fault: bool = False
    _helper: int | None = None
    _stopped_s: float | None = None
    _said: str = ""
    _end_by_s: float | None = None
    _ended_s: float = 0.0
    _oom_kills: int = field(init=False)

    def __post_init__(self) -> None:
        self._oom_kills = _oom_kills()

    def run(self) -> NoReturn:
        """Watch the rank until it has ended and this process may."""
        before_s = time.monotonic()
        while not self._is_over():
            with contextlib.suppress(InterruptedError, ValueError, OSError):
                wait(self.post.sockets, _TICK_S)  # not select(), which knows 1,024 files
            now_s = time.monotonic()
            if now_s - before_s > _GAP_S:
                self._forgive(now_s - before_s)
            before_s = now_s
            self.shared.count_beat()
            self._look(now_s)
            self._obey(now_s)
            self.post.work(self.shared.address.read(), now_s)
        self._leave()

    def _forgive(self, gap_s: float) -> None:
        self.post.forgive(gap_s)
        if self._stopped_s is not None:
            self._stopped_s += gap_s

    def _look(self, now_s: float) -> None:
        """See whether the rank has ended or is stopped, and what it says."""
        if self.status is not None:
            self._look_after_helper(now_s)
            return
        ended, status = os.waitpid(self.process, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if ended and os.WIFSTOPPED(status):
            self._stopped_s = now_s
        elif ended and os.WIFCONTINUED(status):
            self._stopped_s = None
        elif ended:
            self._take_end(os.waitstatus_to_exitcode(status), now_s)
            return
        if self._stopped_s is not None and now_s - self._stopped_s > self.timeouts.stopped_s:
            why = f"has been stopped (SIGSTOP) for {now_s - self._stopped_s:.0f} s"
            self._stopped_s = float("inf")
            phase = self.shared.phase.read()
            report = Report(rank=self.rank, kind=FailureKind.STOPPED, reason=why, phase=phase)
            self.post.report(report, now_s, ended=False)
        self._hear(now_s)

    def _hear(self, now_s: float) -> None:
        word = self.shared.exit_reason.read()
        if word == self._said:
            return
        self._said = word
        report = report_of_word(self.rank, word=word, phase=self.shared.phase.read())
        # That it is done counts when it has ended.
        if report is not None and report.kind is not FailureKind.DONE:
            self.own_fault = report.kind is not FailureKind.LOST_CONTACT
            self.post.report(report, now_s, ended=False)

    def _take_end(self, status: int, now_s: float) -> None:
        self.status = status
        self._ended_s = now_s
        report = report_of_end(
            self.rank,
            status=status,
            word=self.shared.exit_reason.read(),
            phase=self.shared.phase.read(),
            memory_ran_out=_oom_kills() > self._oom_kills,
        )
        if self._end_by_s is None:
            self.own_fault = report.kind not in (FailureKind.LOST_CONTACT, FailureKind.DONE)
        self.post.report(report, now_s, ended=True)
        if report.kind is not FailureKind.DONE and self._is_to_be_found():
            self._helper = self.find_hub()

    def _is_to_be_found(self) -> bool:
        """Whether the hub is unknown, here or to a rank that would ask this one's store for it."""
        if isinstance(self.post, Hub):
            return len(self.post.hosts) < self.post.root_cause.world_size
        return not self.shared.address.read()

    def _look_after_helper(self, now_s: float) -> None:
        if self._helper is None:
            return
        if now_s - self._ended_s > _HELPER_S:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._helper, signal.SIGKILL)
        ended, _ = os.waitpid(self._helper, os.WNOHANG)
        if ended:
            self._helper = None

    def _obey(self, now_s: float) -> None:
        """End the rank if the job ends."""
        if self.post.stop is None or self.status is not None:
            return
        if self._end_by_s is None:
            if self.post.is_blamed:
                self.own_fault = True
                self.shared.blame()
            self._end_by_s = now_s + (_GUILTY_S if self.own_fault else _SURVIVOR_S)
            if not self.own_fault:
                self.shared.end()
        if now_s > self._end_by_s or self._stopped_s is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)

    def _is_over(self) -> bool:
        if self.status is None:
            return False
        # Also when its work is done: srun counts the seconds that others have from the first end.
        nobody_hears = not self.post.is_joined and self._helper is None
        return self.post.is_over or (nobody_hears and not self.shared.address.read())

    def _leave(self) -> NoReturn:
        assert self.status is not None
        if self._helper is not None:
            os.kill(self._helper, signal.SIGKILL)
        if line := self.post.last_line or self._requested():
            # The rank may have been ended in the middle of a line.
            os.write(2, f"\nzorse: {line}\n".encode())
        status, stop = self.status, self.post.stop
        if stop is not None and not self.own_fault:
            status = BAD_INPUT if stop in _BAD_INPUT else LOST_RANK
        elif stop is not None and status == 0:
            status = LOST_RANK
        end_as(status)

    def _requested(self) -> str:
        """What is said, once, where all ranks end because they were asked to."""
        assert self.status is not None
        found = [number for number in (-self.status, *self.passed_on) if number in _REQUESTS]
        failed = self.status > 0 and self.status != ASKED_TO_END
        if self.rank or self.post.stop is not None or failed or not found:
            return ""
        saved = ""
        with contextlib.suppress(Exception):  # the rank's exit status counts for more
            saved = self.saved()
        return f"ended by {signal.Signals(found[0]).name}. {saved}"


def forward(process: int) -> list[int]:
    """Pass on what a launcher sends to this process alone; returns what it will have sent."""
    passed_on: list[int] = []

    def send(number: int, _frame: object) -> None:
        passed_on.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)

    for number in FORWARDED:
        signal.signal(number, send)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    return passed_on


def end_as(status: int) -> NoReturn:
    """End this process as the rank has ended: with its status, or by the same signal."""
    sys.stdout.flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        time.sleep(1)
        os._exit(128 - status)
    os._exit(status)


def _oom_kills() -> int:
    """How many processes the kernel has killed on this node because memory ran out."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            counts = dict(line.split() for line in file)
        return int(counts.get("oom_kill", 0))
    except OSError:
        return 0
