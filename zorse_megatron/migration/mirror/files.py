"""Copies as files in a node's shared memory, which outlive the ranks that wrote them.

A copy is written beside its place and renamed when all of it is there, so a rank that is killed
leaves the copies before it as they were. Two versions are kept of each rank, since ranks
are done with one at different times.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from errno import EPERM
from hashlib import sha256
from pathlib import Path
from stat import S_ISDIR

from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.write import temporary_beside, write_all
from zorse_megatron.migration.mirror.choice import Copy

SHARED_MEMORY = Path("/dev/shm")
KEPT = 2
"""Versions of a rank's copy."""
_MAGIC = b"zorse-mirror 1\n"
_TEMPORARY = ".zorse-*.tmp"


class MirrorFolder:
    """The copies of one training on one node."""

    def __init__(self, training: Iterable[str], *, node: str, root: Path = SHARED_MEMORY) -> None:
        """`training`: what tells it from others, such as its command and checkpoint folder."""
        told = sha256("\0".join(training).encode("utf-8", "surrogateescape")).hexdigest()[:24]
        self.node = node
        self.path = root / f"zorse-mirror-{os.getuid()}-{told}"

    def write(self, copy: Copy, pieces: Iterable[bytes | memoryview]) -> Path:
        """Write a copy, in place of the oldest one of this rank; returns its file.

        To be called when all ranks have written the version before it: the one before that is
        deleted first, so that no more than two take memory. Raises OutputError.
        """
        target = self.path / _name(copy)
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if not self._is_own():
                raise PermissionError(EPERM, "a directory of another user, or a link")
            self._make_room(copy)
            with temporary_beside(target) as (descriptor, temporary):
                write_all(descriptor, _header(copy))
                for piece in pieces:
                    write_all(descriptor, piece)
                os.fchmod(descriptor, 0o600)
                temporary.replace(target)
        except OSError as error:
            raise OutputError("State could not be mirrored", [_problem(target, error)]) from error
        return target

    def copies(self) -> Iterator[Copy]:
        """All that are complete here; none from a folder that somebody else has made."""
        if not self._is_own():
            return
        for path in sorted(self.path.glob("iter*")):
            copy = self._read_header(path)
            if copy is not None:
                yield copy

    def read(self, copy: Copy) -> bytes | None:
        """What was written; None: it is not here."""
        path = self.path / _name(copy)
        if not self._is_own() or self._read_header(path) != copy:
            return None
        with suppress(FileNotFoundError):
            return path.read_bytes()[len(_header(copy)) :]
        return None

    def drop(self, copy: Copy) -> None:
        """Delete one copy, if it is here: of a version that other ranks could not write."""
        if self._is_own():
            (self.path / _name(copy)).unlink(missing_ok=True)

    def keep_only(self, start: str, iteration: int | None = None) -> None:
        """Delete the copies of other starts, and of other iterations if one is given.

        After the choice of what to go on from, and again when a newer one is whole on all nodes.
        """
        for each in self.copies():
            if each.start != start or iteration not in (None, each.iteration):
                (self.path / _name(each)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete everything, also what killed ranks had begun."""
        if not self._is_own():
            return
        with suppress(OSError):  # another rank of the node has begun anew, or has done it
            for path in self.path.iterdir():
                path.unlink(missing_ok=True)
            self.path.rmdir()

    def clear_unfinished(self) -> None:
        """Delete what killed ranks had begun: before any rank of the node writes."""
        if not self._is_own():
            return
        for path in self.path.glob(_TEMPORARY):
            path.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        """Whether the folder is there and this user's: anybody can make one of its name."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        return S_ISDIR(found.st_mode) and found.st_uid == os.getuid()

    def _make_room(self, copy: Copy) -> None:
        mine = [
            each
            for each in self.copies()
            if (each.start, each.rank) == (copy.start, copy.rank) and each != copy
        ]
        for each in sorted(mine)[: -(KEPT - 1)]:
            (self.path / _name(each)).unlink(missing_ok=True)

    def _read_header(self, path: Path) -> Copy | None:
        try:
            with path.open("rb") as file:
                if file.readline() != _MAGIC:
                    return None
                return Copy(**json.loads(file.readline()), node=self.node)
        except (OSError, ValueError, TypeError):
            return None


def _name(copy: Copy) -> str:
    return f"iter{copy.iteration:010}-rank{copy.rank:05}-{copy.start}"


def _header(copy: Copy) -> bytes:
    fields = {
        "iteration": copy.iteration,
        "world_size": copy.world_size,
        "start": copy.start,
        "rank": copy.rank,
    }
    return _MAGIC + json.dumps(fields).encode() + b"\n"


def _problem(target: Path, error: OSError) -> Problem:
    return Problem(
        where=str(target),
        found=error.strerror or str(error),
        expected="room in shared memory for two versions of the copies that this node keeps",
        remedy="Make /dev/shm larger (mount -o remount,size=...; docker --shm-size), or mirror "
        "nothing.",
    )
