"""Decides which rank is to blame when ranks end one after another, and names its death.

One rank that dies takes others with it: their connections break, and their own errors arrive within
milliseconds of its death. Reports are collected for as long as the kind of the first one asks, and
the worst of them is blamed.
"""

import enum
import signal
from collections.abc import Collection
from dataclasses import dataclass


class FailureKind(enum.Enum):
    """What befell a rank, the likeliest cause first: (name, blame, seconds to wait)."""

    KILLED = ("killed", 0, 0.3)
    VANISHED = ("vanished", 0, 0.3)
    SILENT = ("silent", 0, 0.3)
    STOPPED = ("stopped", 1, 0.3)
    LEFT = ("left", 2, 0.5)
    """It ended without a word, by a status of its own."""
    FAILED = ("failed", 2, 0.5)
    """By an error of its own."""
    REFUSED_EARLY = ("refused early", 2, 2.0)
    """Input that was found to be wrong before this rank met the others. Who has come further has
    found the input to be right: files may differ by node. A rank that comes to the same error, of a
    file by another name, is known to by its status, once it has ended."""
    ABORTED = ("aborted", 3, 2.0)
    """By SIGABRT, as NCCL's watchdog does to those that wait for a rank in vain."""
    EXITED = ("exited", 4, 10.0)
    """On request; as a rule all ranks do so together."""
    EXITED_WELL = ("exited well", 4, 0.0)
    """With status 0: another rank may still finish what only it has to, such as the upload of a
    log. It has as long as others would wait for it: see `Timeouts.exit_s`."""
    ASKED_TO_END = ("asked to end", 5, 3.0)
    """By SIGTERM and its like, as a rule together with all others."""
    REFUSED = ("refused", 6, 20.0)
    """Input that is wrong: every other rank comes to the same error, if it is given the time."""
    LOST_CONTACT = ("lost contact", 7, 5.0)
    """To some other rank, whose fault may be seen later: see `Timeouts.silence_s`."""
    DONE = ("done", 8, float("inf"))

    @property
    def blame(self) -> int:
        """Rank with the lowest is blamed."""
        return self.value[1]

    @property
    def patience_s(self) -> float:
        """How long others have to say something that explains it."""
        return self.value[2]


LEAST_SILENCE_S = 5.0
_TOGETHER = (
    FailureKind.FAILED,
    FailureKind.EXITED,
    FailureKind.EXITED_WELL,
    FailureKind.ASKED_TO_END,
    FailureKind.REFUSED,
    FailureKind.REFUSED_EARLY,
)
_GO_ALONE = (FailureKind.EXITED, FailureKind.EXITED_WELL, FailureKind.REFUSED)
_IN_VAIN_S = 60.0
"""Who aborts so long after another one's exit has waited for it, until NCCL's watchdog gave up."""
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long what may be harmless is put up with."""

    silence_s: float = 15.0
    """A watcher needs none of the rank's locks and next to no time, so that only a node or network
    that is down, or memory that thrashes, can keep it from speaking. Shorter than the 30 s that
    torchrun and the 60 s that the batch script wait for ranks to end."""
    stopped_s: float = 8.0
    """A debugger's stop (ptrace) does not count, and neither does one of the watcher too."""
    exit_s: float = 600.0
    """How long a rank may have to itself when others have come to their end, as Megatron lets them
    wait for it in a collective: `--distributed-timeout-minutes`, of which this is the default."""
    meeting_s: float = 600.0
    """How long others may come later than the first ones, as `init_process_group` waits for them.
    In an elastic job all processes have met before, and whoever stays away is gone."""
    joining_s: float = 30.0
    """How long a job that cannot start waits for ranks that are still importing, to tell them."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a watcher saw of its rank."""

    rank: int
    kind: FailureKind
    reason: str = ""
    phase: str = ""
    status: int = 0
    """The exit status, negative for a signal; 0 while it has not ended."""


class RootCause:
    """Collects reports; says who is to blame once that is clear."""

    def __init__(self, world_size: int, timeouts: Timeouts) -> None:
        self.world_size = world_size
        self.timeouts = timeouts
        self.reports: dict[int, tuple[Report, float]] = {}
        self.ended: set[int] = set()
        self.met_s = 0.0
        """When the last rank joined: what it has seen arrives only then."""

    def note(self, report: Report, now_s: float) -> None:
        """Take a report; of several about a rank the one that blames it most, and when it began."""
        known = self.reports.get(report.rank)
        if known is None or known[0].kind is FailureKind.DONE:
            self.reports[report.rank] = (report, now_s)
        elif report.kind is known[0].kind:
            self.reports[report.rank] = (report, known[1])
        elif known[0].kind is FailureKind.LOST_CONTACT and report.kind is not FailureKind.DONE:
            self.reports[report.rank] = (report, now_s)

    def culprit(
        self, now_s: float, *, joined: Collection[int], late: Collection[int]
    ) -> Report | None:
        """Return whom to blame, if it is time to. `late`: ranks whose beat is overdue."""
        found = self.reports.values()
        faults = [(report, at_s) for report, at_s in found if report.kind is not FailureKind.DONE]
        if not faults or self._is_agreed():
            return None
        exits_s = [at_s for report, at_s in faults if report.kind is FailureKind.EXITED_WELL]
        in_vain_s = min(exits_s, default=float("inf")) + _IN_VAIN_S

        def blame(report: Report, at_s: float) -> int:
            is_vain = report.kind is FailureKind.ABORTED and at_s > in_vain_s
            return FailureKind.EXITED_WELL.blame if is_vain else report.kind.blame

        worst, _ = min(faults, key=lambda fault: (blame(*fault), fault[1]))
        due_s = min(
            self._since_s(report, at_s) + self._patience_s(report) for report, at_s in faults
        )
        if late and worst.kind.blame >= FailureKind.ABORTED.blame:
            return None  # that one may be the reason
        if len(self.ended) == self.world_size:
            return worst
        if len(joined) < self.world_size:
            first_s = min(at_s for _, at_s in faults)
            due_s = max(due_s, first_s + self.timeouts.joining_s)
        return worst if now_s >= due_s else None

    def _since_s(self, report: Report, at_s: float) -> float:
        """From when on others could explain it."""
        return max(at_s, self.met_s) if report.kind is FailureKind.REFUSED_EARLY else at_s

    def _patience_s(self, report: Report) -> float:
        if report.kind is FailureKind.LOST_CONTACT:
            return self.timeouts.silence_s + report.kind.patience_s
        if report.kind in _GO_ALONE and self._is_missed():
            return 1.0
        if report.kind is FailureKind.EXITED_WELL:
            return self.timeouts.exit_s
        return report.kind.patience_s

    def _is_missed(self) -> bool:
        return any(report.kind is FailureKind.LOST_CONTACT for report, _ in self.reports.values())

    def _is_agreed(self) -> bool:
        """Whether all ranks whose work is not done end alike, and have said so themselves."""
        reports = [
            report for report, _ in self.reports.values() if report.kind is not FailureKind.DONE
        ]
        if len(self.reports) < self.world_size or not {r.kind for r in reports} <= set(_TOGETHER):
            return False
        ended = len(self.ended) == self.world_size
        alike = {(r.kind, r.status if ended else r.reason) for r in reports}
        return len(alike) <= 1


def report_of_end(rank: int, *, status: int, word: str, phase: str, memory_ran_out: bool) -> Report:
    """Report on a process that has ended; `status`: negative for a signal."""
    said = report_of_word(rank, word=word, phase=phase, status=status)
    kind, why = FailureKind.LEFT, f"ended with status {status}, without a word"
    if status < 0:
        name = _signal_name(-status)
        kind, why = FailureKind.KILLED, f"was killed by signal {-status} ({name})"
        if -status == signal.SIGKILL and memory_ran_out:
            why += ": its node had no memory left"
        elif -status == signal.SIGABRT:
            kind = FailureKind.ABORTED
        elif -status in _REQUESTS:
            kind, why = FailureKind.ASKED_TO_END, f"was ended by {name}"
    elif said is not None and said.kind is FailureKind.DONE and status != 0:
        why = f"ended with status {status}, with all its work done,"
    elif said is not None:
        return said
    return Report(rank=rank, kind=kind, reason=why, phase=phase, status=status)


def report_of_word(rank: int, *, word: str, phase: str, status: int = 0) -> Report | None:
    """Report on a rank that is about to end, in its own words; None if it has said nothing."""
    kind, _, why = word.partition(":")
    if not kind:
        return None
    return Report(rank=rank, kind=FailureKind[kind], reason=why, phase=phase, status=status)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
