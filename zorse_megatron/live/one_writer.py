"""One job at a time writes into a folder of checkpoints.

The first rank of a job keeps a file there that says who it is, and touches it every 5 s. All that
this asks of the file system NFS has, too: a file that is only made where there is none, a rename,
the time of a change. No clock is compared with that of another host.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.files.read_write import temporary_beside, write_all

WRITER_NAME = "zorse-writer.json"
_BEAT_S = 5.0
_SILENT_S = 20.0
"""Who has not touched its file for so long, while it was looked at, is gone."""
_LOOK_S = 0.5
_MOST_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A process that writes into the folder."""

    host: str
    process: int
    started_s: float
    """In seconds since 1970, by its host's clock."""
    ticks: int
    """When its host's kernel started the process: numbers are used again."""
    place: str
    """Start of the host and name space of its processes: where their numbers count."""
    run: str = ""
    """Of an elastic job, whose processes have met anew when it starts again."""
    token: str = ""

    @classmethod
    def of_this_process(cls, run: str) -> "Writer":
        """Who is about to write."""
        return cls(
            host=socket.gethostname(),
            process=os.getpid(),
            started_s=round(time.time(), 3),
            ticks=_ticks(os.getpid()) or 0,
            place=_place(),
            run=run,
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started_s))
        return f"process {self.process} on {self.host}, since {when}"


class OneWriter:
    """What this job has of the folder, until `release`."""

    def __init__(self, folder: Path, run: str, *, tell: Callable[[str], None]) -> None:
        """Take it, in 20 s at most. `run`: see `Writer`; `tell`: shows a line.

        Raises CheckpointError where another job writes there, OSError where no file can be made.
        """
        self.path = folder / WRITER_NAME
        self._me = Writer.of_this_process(run)
        self._tell = tell
        self._taken_by: Writer | None = None
        self._is_over = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._take()
        self._thread = threading.Thread(target=self._keep, name="one-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError where another job has taken the folder: this one was silent."""
        there = self._there()
        if there is not None and there != self._me:
            self._taken_by = there
        if self._taken_by is not None:
            raise CheckpointError("nothing more is saved", [self._problem(self._taken_by)])

    def release(self) -> None:
        """Leave the folder to others."""
        self._is_over.set()
        self._thread.join(_BEAT_S)  # the folder may be away
        with contextlib.suppress(OSError):
            if self._there() == self._me:
                self.path.unlink()

    def _take(self) -> None:
        while not self._make():
            other = self._there()
            if other is not None and not self._is_gone(other):
                raise CheckpointError("two jobs would write one folder", [self._problem(other)])
            if other is None and (not os.path.lexists(self.path) or self._is_touched()):
                continue  # it was released, or is being written
            if self._there() != other:
                continue  # another job was faster
            self._tell(f"note: {self.path} is left of {other or 'nobody known'}, which is gone")
            self._replace()
            time.sleep(_LOOK_S)
            if self._there() == self._me:  # else another job has replaced it, too
                return

    def _make(self) -> bool:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        try:
            write_all(file, self._text())
        finally:
            os.close(file)
        return True

    def _replace(self) -> None:
        with temporary_beside(self.path) as (file, temporary):
            write_all(file, self._text())
            temporary.replace(self.path)

    def _text(self) -> bytes:
        return json.dumps(asdict(self._me)).encode()

    def _there(self) -> Writer | None:
        """Who the file names; None where there is none, or one that is not whole."""
        try:
            with self.path.open("rb") as file:
                return Writer(**json.loads(file.read(_MOST_BYTES)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _is_gone(self, other: Writer) -> bool:
        if other.place == self._me.place and other.host == self._me.host:
            return self._has_ended(other)
        if self._is_of_my_run(other):
            return True
        return not self._is_touched()

    def _is_of_my_run(self, other: Writer) -> bool:
        return bool(other.run) and other.run == self._me.run

    def _has_ended(self, other: Writer) -> bool:
        """Whether a process of this host has; one of the same run is to end, and may take 20 s."""
        until_s = time.monotonic() + (_SILENT_S if self._is_of_my_run(other) else 0.0)
        while other.ticks == _ticks(other.process):
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def _is_touched(self) -> bool:
        """Whether somebody changes the file while it is looked at."""
        self._tell(f"note: waiting {_SILENT_S:g} s for a sign of who has {self.path}")
        before, until_s = self._change(), time.monotonic() + _SILENT_S
        while time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            if self._change() != before:
                return True
        return False

    def _change(self) -> tuple[int, int] | None:
        """Which file it is, and its last change; opened, so that NFS asks its server."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            about = os.fstat(file)
        finally:
            os.close(file)
        return about.st_ino, about.st_mtime_ns

    def _keep(self) -> None:
        """Touch the file, for as long as it is this job's."""
        while not self._is_over.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # the folder may be away for a while
                there = self._there()
                if there == self._me:
                    os.utime(self.path)
                elif there is None:
                    self._make()
                else:
                    self._taken_by = there
                    return

    def _problem(self, other: Writer) -> Problem:
        return Problem(
            where=str(self.path),
            found=f"{other}, writing there",
            expected="a folder that one job writes into",
            remedy="End that job, or wait for it; or give this one another --save.",
        )


def _ticks(process: int) -> int | None:
    """When a process of this host was started; None: there is none, or it has ended."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            state, *rest = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


def _place() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(8)  # like no other: it is looked at whether there are signs
