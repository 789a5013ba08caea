"""Write a file atomically, to a regular file or an open stream, following links.

Every command writes through here. A file is written beside its place and then renamed, so that
whoever reads it sees the old text or the new one, also if the machine stops half way.
"""

import contextlib
import errno
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.target import regular_target, stream_of

# What file systems answer that have no such call.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_REMEDIES = {
    errno.ENOSPC: "Make room there, or choose another path.",
    errno.EDQUOT: "Make room within your quota, or choose another path.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or choose another path.",
    errno.ENOENT: "Make the directory, or choose another path.",
    errno.EPIPE: "Its reader is gone.",
}
EXPECTED = "a regular file of its own, or a new one in a directory that exists and takes files"


class NotWritten(OutputError):
    """A file could not be written when its content was there, which only this rank knows."""

    is_of_one_rank = True

    def __init__(self, path: Path, error: OSError, kept: Path | None) -> None:
        self.kept = kept
        """Where the content is instead; None: nowhere."""
        remedy = remedy_for(error)
        if kept is not None:
            remedy += f" What was to be written is in {kept}."
        problem = Problem(
            where=str(path), found=error.strerror or str(error), expected=EXPECTED, remedy=remedy
        )
        super().__init__(f"{path} could not be written", [problem])


def remedy_for(error: OSError) -> str:
    """What to do about a failed write."""
    return _REMEDIES.get(error.errno or 0, "Choose another path.")


def write_text(path: str | Path, text: str, *, parents: bool = False) -> Path:
    """Write UTF-8 with Unix line ends, as `write_bytes` does."""
    # Names of files need not be UTF-8; Python keeps their odd bytes as surrogates.
    return write_bytes(path, text.encode("utf-8", "surrogateescape"), parents=parents)


def write_bytes(path: str | Path, data: bytes, *, parents: bool = False) -> Path:
    """Write a file and return its path. Raises NotWritten, with the content kept elsewhere.

    A link stays a link, a file keeps its mode; a directory, device, FIFO or socket is refused.
    `parents`: make the directories that it is to be in.
    """
    path = Path(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = stream_of(path)
        if descriptor is not None:
            _write_to_stream(descriptor, data)
        else:
            _replace(regular_target(path), data)
    except OSError as error:
        raise NotWritten(path, error, _kept_elsewhere(path.name, data)) from error
    return path


def append_line(path: Path, line: str) -> None:
    """Append a line: all of it or nothing, so that a reader can follow. Raises NotWritten."""
    data = f"{line}\n".encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = stream_of(path)
        if descriptor is not None:
            _write_to_stream(descriptor, data)
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(regular_target(path), flags, 0o666)
        try:
            before = os.fstat(file).st_size
            try:
                write_all(file, data)
            except OSError:
                os.ftruncate(file, before)
                raise
        finally:
            os.close(file)
    except OSError as error:
        raise NotWritten(path, error, None) from error


@contextmanager
def temporary_beside(target: Path) -> Iterator[tuple[int, Path]]:
    """Open a new file in a directory; it is gone after the block unless it was renamed."""
    # Its own short name: that of the target may be as long as names can be.
    temporary = target.parent / f".zorse-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)  # less the umask
    try:
        yield descriptor, temporary
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _replace(target: Path, data: bytes) -> None:
    with temporary_beside(target) as (descriptor, temporary):
        with contextlib.suppress(FileNotFoundError):
            _become_like(target.stat(), descriptor)
        write_all(descriptor, data)
        _sync(descriptor)
        temporary.replace(target)
    with contextlib.suppress(OSError):  # the file is there in any case
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _become_like(old: os.stat_result, descriptor: int) -> None:
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, old.st_mode & 0o777)


def _write_to_stream(descriptor: int, data: bytes) -> None:
    if sys.stdout is not None:
        sys.stdout.flush()  # what was printed before comes before
    write_all(descriptor, data)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write to an open file until all is written. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _kept_elsewhere(name: str, data: bytes) -> Path | None:
    """Put what took long to find where temporary files go."""
    try:
        descriptor, text = tempfile.mkstemp(prefix="zorse-", suffix=f"-{name[-100:]}")
    except OSError:
        return None
    path = Path(text)
    try:
        write_all(descriptor, data)
    except OSError:
        path.unlink()
        return None
    finally:
        os.close(descriptor)
    return path
