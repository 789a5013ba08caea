"""The watchers' talk: that of rank 0 hears all others, and has the job end."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from zorse_megatron.live.listener import LineSocket, Listener
from zorse_megatron.live.root_cause import FailureKind, Report, RootCause, Timeouts
from zorse_megatron.plan.spans import spans_of, spell

BEAT_S = 1.0
_LATE_S = 3.0
_END_S = 8.0
"""How long ranks have to end once they are told to: their watchers kill them before that."""
NAMED_S = 25.0
"""After which those are named who have not come so far."""
_AFTER_CULPRIT_S = 0.3
"""A launcher blames the process that it sees to end first, and torchrun looks every 0.1 s."""


class Hub:
    """Serves the watchers of all other ranks."""

    is_joined = True
    """See `Member`."""

    def __init__(
        self,
        world_size: int,
        listener: Listener,
        *,
        timeouts: Timeouts,
        describe: Callable[[int], str],
        host: str,
        tell: Callable[[str], None],
    ) -> None:
        """`describe`: names a rank for people; `host`: name of this node; `tell`: shows a line."""
        self.describe = describe
        self.tell = tell
        self.timeouts = timeouts
        self.root_cause = RootCause(world_size, timeouts)
        self.listener = listener
        self.hosts = {0: host}
        self.last_heard_s: dict[int, float] = {}
        self.culprit: Report | None = None
        self.line = ""
        self.is_over = False
        self._members: dict[LineSocket, int | None] = {}
        self._came_s: float | None = None
        """When the last rank so far came to where all meet."""
        self._absent: set[int] = set()
        self._has_named_absent = False
        self._told_s: float | None = None
        self._said_s: float | None = None
        self._own_end_s: float | None = None
        self._next_beat_s = 0.0

    @property
    def sockets(self) -> list[Any]:
        """What to wait for."""
        return [*self.listener.sockets, *self._members]

    @property
    def stop(self) -> FailureKind | None:
        """Why the job ends, once it does."""
        return None if self.culprit is None else self.culprit.kind

    @property
    def is_blamed(self) -> bool:
        """Whether the hub's own rank is to blame for that."""
        return self.culprit is not None and self.culprit.rank == 0

    @property
    def last_line(self) -> str:
        """What is said at the end, if anything: what was decided."""
        return f"error: {self.line}" if self.line else ""

    def report(self, report: Report, now_s: float, *, ended: bool) -> None:
        """Take what the watcher of rank 0 itself has seen."""
        self.root_cause.note(report, now_s)
        if ended:
            self._own_end_s = now_s
            self.root_cause.ended.add(report.rank)

    def forgive(self, gap_s: float) -> None:
        """This process has stood still, and could hear nobody."""
        self.last_heard_s = {rank: at_s + gap_s for rank, at_s in self.last_heard_s.items()}
        if self._came_s is not None:
            self._came_s += gap_s

    def work(self, address: str, now_s: float) -> None:
        """Hear, speak and decide; to be called several times a second.

        `address`: of this hub, "" until its own rank has come to where all meet.
        """
        if address and self._came_s is None:
            self._came_s = now_s
        for line, _ in self.listener.admitted(now_s):
            if self._told_s is None:  # else this job ends, and who comes is of the next one
                self._members[line] = None
                line.send({"beat": 1})
            else:
                line.close()
        for member in list(self._members):
            for message in member.receive():
                self._hear(member, message, now_s)
            if not member.is_open:
                self._lose(member, now_s)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            self._tell_all({"beat": 1})
        self._look_for_silent(now_s)
        self._look_for_absent(now_s)
        for member in self._members:
            member.flush()
        self._decide(now_s)

    def _hear(self, member: LineSocket, message: dict[str, Any], now_s: float) -> None:
        rank = self._members.get(member)
        if rank is None:
            rank = message.get("rank")
            if not isinstance(rank, int) or not 0 < rank < self.root_cause.world_size:
                member.close()  # of another version
                return
            self._members[member] = rank
            self.hosts[rank] = str(message.get("host"))
            self._came_s = now_s
            if len(self.hosts) == self.root_cause.world_size:
                self.root_cause.met_s = now_s
        self.last_heard_s[rank] = now_s
        if "kind" in message:
            report = Report(
                rank=rank,
                kind=FailureKind[message["kind"]],
                reason=message["reason"],
                phase=message["phase"],
                status=message["status"],
            )
            self.root_cause.note(report, now_s)
        if message.get("ended"):
            self.root_cause.ended.add(rank)

    def _lose(self, member: LineSocket, now_s: float) -> None:
        rank = self._members.pop(member)
        if rank is None:
            return
        self.last_heard_s.pop(rank, None)
        if rank not in self.root_cause.ended:
            why = "is gone, and so is the process that watched it"
            self.root_cause.note(Report(rank=rank, kind=FailureKind.VANISHED, reason=why), now_s)
            self.root_cause.ended.add(rank)

    def _unheard(self, limit_s: float, now_s: float) -> list[int]:
        return [rank for rank, at_s in self.last_heard_s.items() if now_s - at_s > limit_s]

    def _look_for_silent(self, now_s: float) -> None:
        for rank in self._unheard(self.timeouts.silence_s, now_s):
            if rank not in self.root_cause.ended:
                self.root_cause.note(silent(rank, now_s - self.last_heard_s[rank]), now_s)

    def _look_for_absent(self, now_s: float) -> None:
        """Name those that do not come to where the others have met; in the end give them up."""
        limit_s = self.timeouts.meeting_s
        if self._came_s is None or now_s - self._came_s <= min(limit_s, NAMED_S):
            return
        absent = set(range(self.root_cause.world_size)) - self.hosts.keys() - self._absent
        if absent and not self._has_named_absent and limit_s > NAMED_S:
            self._has_named_absent = True
            are = "ranks {} are" if len(absent) > 1 else "rank {} is"
            who = are.format(spell(spans_of(absent)))
            self.tell(f"after {NAMED_S:g} s {who} still missing; the others wait {limit_s:g} s")
        for rank in absent if now_s - self._came_s > limit_s else ():
            why = f"has not come to meet the others in {limit_s:g} s: it or its node is gone"
            self.root_cause.note(Report(rank=rank, kind=FailureKind.VANISHED, reason=why), now_s)
            self._absent.add(rank)

    def _decide(self, now_s: float) -> None:
        if self._said_s is not None:
            self._part(now_s, self._said_s)
        elif self._told_s is not None:
            joined = {rank for rank in self._members.values() if rank is not None} | {0}
            reachable = joined.difference(self._unheard(self.timeouts.silence_s, now_s))
            waited_s = now_s - self._told_s
            if reachable <= self.root_cause.ended or waited_s > _END_S:
                self._speak(now_s)
        else:
            late = set(self._unheard(_LATE_S, now_s)) - self.root_cause.ended
            joined = self.hosts.keys() | self._absent
            self.culprit = self.root_cause.culprit(now_s, joined=joined, late=late)
            if self.culprit is not None:
                self._told_s = now_s
                self._tell_all({"stop": self.culprit.kind.name, "blamed": self.culprit.rank})
            elif len(self.root_cause.ended) == self.root_cause.world_size or self._has_lingered(
                now_s
            ):
                self._tell_all({"bye": 1})
                self.is_over = True

    def _has_lingered(self, now_s: float) -> bool:
        """Whether others have had their time since the work of the hub's own rank was done."""
        mine = self.root_cause.reports.get(0)
        return (
            self._own_end_s is not None
            and mine is not None
            and mine[0].kind is FailureKind.DONE
            and now_s - self._own_end_s > self.timeouts.exit_s
        )

    def _speak(self, now_s: float) -> None:
        assert self.culprit is not None
        self._said_s = now_s
        self.line = sentence(self.culprit, self.describe, self.hosts)
        for member, rank in self._members.items():
            if rank == self.culprit.rank:
                member.send({"bye": 1})
        if self.culprit.rank == 0:
            self._tell_all({"bye": 1})
            self.is_over = True

    def _part(self, now_s: float, said_s: float) -> None:
        if now_s - said_s > _AFTER_CULPRIT_S:
            self._tell_all({"bye": 1})
            self.is_over = True

    def _tell_all(self, message: dict[str, Any]) -> None:
        for member in self._members:
            member.send(message)


def silent(rank: int, silent_s: float) -> Report:
    """Report a rank whose watcher says nothing."""
    why = f"has been silent for {silent_s:.0f} s: its node or network is down, or it is stopped"
    return Report(rank=rank, kind=FailureKind.SILENT, reason=why)


def sentence(culprit: Report, describe: Callable[[int], str], hosts: dict[int, str]) -> str:
    """Say who is to blame, and in which phase, in one line."""
    host = hosts.get(culprit.rank)
    where = f" on {host}" if host and len(set(hosts.values())) > 1 else ""
    phase = f" {culprit.phase}" if culprit.phase else ""
    return f"{describe(culprit.rank)}{where} {culprit.reason}{phase}; the job ends"


# The watcher of any other rank: tells that of rank 0 what it sees, and obeys it.


_CONNECT_S = 2.0
_RETRY_S = 0.5
_CONNECTING_S = 10.0
_REFUSED_S = 1.5
"""No hub listens there after this long: it listens before its address is known."""
_BYE_S = 45.0
"""How much longer than any rank may take to its end this process waits for the hub's leave."""


def answers(address: str) -> bool:
    """Whether the hub of a job that goes on listens there: "host port token"."""
    host, port, token = address.split()
    try:
        line = LineSocket.connect(host, int(port), token, timeout_s=_CONNECT_S)
    except OSError:
        return False
    with contextlib.closing(line):
        if line.is_open:
            waited_for: list[Any] = [line]
            wait(waited_for, _CONNECT_S)
        return bool(line.receive())


class Member:
    """The connection to the hub. Until its address is known, reports wait."""

    def __init__(
        self,
        rank: int,
        *,
        timeouts: Timeouts,
        describe: Callable[[int], str],
        host: str,
        speaks: bool,
    ) -> None:
        """See `Hub`. `speaks`: whether it says for its node that the hub is gone, if it is."""
        self.speaks = speaks
        self.describe = describe
        self.rank = rank
        self.timeouts = timeouts
        self.host = host
        self.stop: FailureKind | None = None
        """Why this rank has to end, once it has to."""
        self.is_blamed = False
        self.lost_hub: Report | None = None
        self.has_heard = False
        """Whether the hub has said anything. To who comes when it is gone, the job may have ended
        long since, with its last line."""
        self.is_over = False
        self._line: LineSocket | None = None
        self._reports: list[dict[str, Any]] = []
        self._num_sent = 0
        self._heard_s = 0.0
        self._next_beat_s = 0.0
        self._next_try_s = 0.0
        self._first_try_s: float | None = None
        self._ended_s: float | None = None

    @property
    def sockets(self) -> list[Any]:
        """What to wait for."""
        return [] if self._line is None or not self._line.is_open else [self._line]

    @property
    def is_joined(self) -> bool:
        """Whether the hub was found, be it gone by now."""
        return self._line is not None or self.lost_hub is not None

    @property
    def last_line(self) -> str:
        """What is said at the end, if anything: that the hub is gone, which speaks for all."""
        if self.lost_hub is None or not self.lost_hub.reason:
            return ""
        if not self.has_heard:
            return (
                f"{self.describe(self.rank)} comes too late: {self.describe(0)} "
                f"{self.lost_hub.reason}; if the job has ended before, its last line says why"
            )
        return f"error: {sentence(self.lost_hub, self.describe, {0: ''})}" if self.speaks else ""

    def report(self, report: Report, now_s: float, *, ended: bool) -> None:
        """Tell what this watcher has seen of its rank."""
        if ended:
            self._ended_s = now_s
        self._reports.append(
            {
                "kind": report.kind.name,
                "reason": report.reason,
                "phase": report.phase,
                "status": report.status,
                "ended": ended,
            }
        )

    def forgive(self, gap_s: float) -> None:
        """This process has stood still, and could hear nobody."""
        self._heard_s += gap_s

    def work(self, address: str, now_s: float) -> None:
        """Hear and speak; to be called several times a second. `address`: "" while unknown."""
        if self._line is None:
            if address and self.lost_hub is None and now_s >= self._next_try_s:
                self._connect(address, now_s)
        elif self._line.is_open:
            self._talk(self._line, now_s)
        if self._ended_s is not None and (
            self.lost_hub is not None
            or (self.is_joined and now_s - self._ended_s > self.timeouts.exit_s + _BYE_S)
        ):
            self.is_over = True

    def _connect(self, address: str, now_s: float) -> None:
        host, port, token = address.split()
        self._first_try_s = self._first_try_s or now_s
        self._next_try_s = now_s + _RETRY_S
        try:
            self._line = LineSocket.connect(host, int(port), token, timeout_s=_CONNECT_S)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            if now_s - self._first_try_s > (_REFUSED_S if refused else _CONNECTING_S):
                self._lose(f"is gone: its watcher at {host}:{port} does not answer ({error})")
            return
        self._line.send({"rank": self.rank, "host": self.host})
        self._num_sent = 0
        self._send_reports(self._line)  # or the hub would take a rank that has failed for well
        self._heard_s = now_s

    def _talk(self, line: LineSocket, now_s: float) -> None:
        for message in line.receive():
            self._heard_s = now_s
            self.has_heard = True
            if "stop" in message:
                self.stop = FailureKind[message["stop"]]
                self.is_blamed = message["blamed"] == self.rank
            self.is_over = self.is_over or "bye" in message
        self._send_reports(line)
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            line.send({"beat": 1})
        line.flush()
        if self.is_over:
            return
        if not line.is_open and self._may_try_again(now_s):
            self._line = None  # the token came late, to a hub that closes on strangers
        elif not line.is_open:
            self._lose("is gone, and so is the process that watched it")
        elif now_s - self._heard_s > self.timeouts.silence_s:
            line.close()
            self._lose(silent(0, now_s - self._heard_s).reason)

    def _may_try_again(self, now_s: float) -> bool:
        first_s = self._first_try_s or now_s
        return not self.has_heard and now_s - first_s <= _CONNECTING_S

    def _send_reports(self, line: LineSocket) -> None:
        for message in self._reports[self._num_sent :]:
            line.send(message)
        self._num_sent = len(self._reports)

    def _lose(self, why: str) -> None:
        self.lost_hub = Report(rank=0, kind=FailureKind.VANISHED, reason=why)
        if self.stop is None:
            self.stop = FailureKind.VANISHED
        else:  # the hub has had its say
            self.lost_hub = replace(self.lost_hub, reason="")
