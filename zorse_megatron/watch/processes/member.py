"""The watcher of any other rank: tells that of rank 0 what it sees, and obeys it."""

import socket
from dataclasses import replace
from typing import Any

from zorse_megatron.watch.processes.hub import BEAT_S, silent
from zorse_megatron.watch.processes.line_socket import LineSocket
from zorse_megatron.watch.processes.root_cause import FailureKind, Limits, Report

_CONNECT_S = 2.0
_RETRY_S = 0.5
_CONNECTING_S = 10.0
_REFUSED_S = 1.5
"""No hub listens there after this long: it listens before its address is known."""
_BYE_S = 45.0
"""How much longer than any rank may take to its end this process waits for the hub's leave."""


class Member:
    """The connection to the hub. Until its address is known, reports wait."""

    def __init__(self, rank: int, *, limits: Limits, host: str) -> None:
        self.rank = rank
        self.limits = limits
        self.host = host
        self.stop: FailureKind | None = None
        """Why this rank has to end, once it has to."""
        self.is_blamed = False
        self.lost_hub: Report | None = None
        self.has_heard = False
        """Whether the hub has said anything. To who comes when it is gone, the job may have ended
        long since, with its last line."""
        self.speaks = False
        """Whether this process speaks for its node if the hub is gone; the hub says which one."""
        self.is_over = False
        self._line: LineSocket | None = None
        self._waiting: list[dict[str, Any]] = []
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

    def report(self, report: Report, now_s: float, *, ended: bool) -> None:
        """Tell what this watcher has seen of its rank."""
        if ended:
            self._ended_s = now_s
        self._waiting.append(
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
            or (self.is_joined and now_s - self._ended_s > self.limits.exit_s + _BYE_S)
        ):
            self.is_over = True

    def _connect(self, address: str, now_s: float) -> None:
        host, port, token = address.split()
        self._first_try_s = self._first_try_s or now_s
        self._next_try_s = now_s + _RETRY_S
        try:
            connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            if now_s - self._first_try_s > (_REFUSED_S if refused else _CONNECTING_S):
                self._lose(f"is gone: its watcher at {host}:{port} does not answer ({error})")
            return
        self._line = LineSocket(connection)
        self._line.send({"token": token, "rank": self.rank, "host": self.host})
        self._send_reports(self._line)  # or the hub would take a rank that has failed for well
        self._heard_s = now_s

    def _talk(self, line: LineSocket, now_s: float) -> None:
        for message in line.receive():
            self._heard_s = now_s
            self.has_heard = True
            self.speaks = message.get("speaks", self.speaks)
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
        if not line.is_open:
            self._lose("is gone, and so is the process that watched it")
        elif now_s - self._heard_s > self.limits.silence_s:
            line.close()
            self._lose(silent(0, now_s - self._heard_s).reason)

    def _send_reports(self, line: LineSocket) -> None:
        for message in self._waiting:
            line.send(message)
        self._waiting.clear()

    def _lose(self, why: str) -> None:
        self.lost_hub = Report(rank=0, kind=FailureKind.VANISHED, reason=why)
        if self.stop is None:
            self.stop = FailureKind.VANISHED
        else:  # the hub has had its say
            self.lost_hub = replace(self.lost_hub, reason="")
