"""Reads bounded files that a user names; writes files completely, or not at all.

Every command writes through here. A file is written beside its place and then renamed, so that
whoever reads it sees the old text or the new one, also if the machine stops half way.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zorse_megatron.errors import OutputError, Problem

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


def write_text(
    path: str | Path, text: str, *, parents: bool = False, follows_link: bool = True
) -> Path:
    """Write UTF-8 with Unix line ends, as `write_bytes` does."""
    # Names of files need not be UTF-8; Python keeps their odd bytes as surrogates.
    data = text.encode("utf-8", "surrogateescape")
    return write_bytes(path, data, parents=parents, follows_link=follows_link)


def write_bytes(
    path: str | Path, data: bytes, *, parents: bool = False, follows_link: bool = True
) -> Path:
    """Write a file and return its path. Raises NotWritten, with the content kept elsewhere.

    A link stays a link, a file keeps its mode; a directory, device, FIFO or socket is refused.
    `parents`: make the directories that it is to be in. `follows_link`: False for a name that is
    not the user's, in a directory that others may write to: the file takes the place of a link.
    """
    path = Path(path)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = stream_of(path) if follows_link else None
        if descriptor is not None:
            _write_to_stream(descriptor, data)
        else:
            _replace(regular_target(path) if follows_link else _own_place(path), [data])
    except OSError as error:
        raise NotWritten(path, error, _kept_elsewhere(path.name, data)) from error
    return path


def write_parts(path: Path, parts: Iterable[bytes]) -> Path:
    """Write a file that need not fit into memory, and return its path. Raises NotWritten."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(regular_target(path), parts)
    except OSError as error:
        raise NotWritten(path, error, None) from error
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


def _replace(target: Path, parts: Iterable[bytes]) -> None:
    with temporary_beside(target) as (descriptor, temporary):
        with contextlib.suppress(FileNotFoundError):
            old = target.lstat()
            if stat.S_ISREG(old.st_mode):  # else a link, which is not followed
                _become_like(old, descriptor)
        for part in parts:
            write_all(descriptor, part)
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


# Read a bounded file that a user names.


class NotInputError(OSError):
    """A path leads to something that is not read; `strerror` names it, with its article."""


MAX_INPUT_BYTES = 64 * 2**20
"""Above any plan, cluster, model or profile: a plan of 100,000 GPUs has some 10 MiB."""


def read_input(path: str | Path, *, max_bytes: int = MAX_INPUT_BYTES) -> bytes:
    """Return the bytes of a regular file, or of a stream such as /dev/stdin or `<(command)`.

    Raises NotInputError for anything else (a FIFO or device may never end), and for more bytes;
    any other OSError where there is nothing to read.
    """
    path = Path(path)
    stream = stream_of(path)
    # Not blocking: a FIFO that nobody writes to would be waited for before it can be told.
    descriptor = (
        os.dup(stream) if stream is not None else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    )
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and (stream is None or stat.S_ISDIR(mode)):
            raise NotInputError(errno.EINVAL, kind_of(mode))
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise NotInputError(errno.EFBIG, f"a file of more than {max_bytes / 2**20:.0f} MiB")
    return data


# What an output path resolves to: a regular file, or an open stream.


_MAX_LINKS = 40  # as Linux
_DESCRIPTORS = re.compile(r"/dev/fd|/proc/(?P<process>\d+)(/task/\d+)?/fd")


def stream_of(path: Path) -> int | None:
    """Return the descriptor that `/dev/stdout`, `/dev/fd/63` or a link to them stands for.

    None for any other path. Such a stream is written to: replacing its path would not reach who
    reads from it.
    """
    current = path
    for _ in range(_MAX_LINKS):
        directory = _DESCRIPTORS.fullmatch(os.path.realpath(current.parent))
        if directory and directory["process"] in (None, str(os.getpid())):
            return int(current.name) if current.name.isdigit() else None
        if not current.is_symlink():
            return None
        current = current.parent / os.readlink(current)
    return None


def regular_target(path: Path) -> Path:
    """Return the regular file that `path` is or leads to, or the place of a new one.

    Raises OSError where there is something else, no directory, or no permission to change it.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            # Of a link that leads nowhere the directory at its end is missing.
            named = path.parent if not path.is_symlink() else target.parent
            raise FileNotFoundError(errno.ENOENT, f"no directory {named}") from None
        return target
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, kind_of(mode))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "a file that may not be changed")
    return Path(os.path.realpath(path))


def _own_place(path: Path) -> Path:
    """`path` itself, where a file may take its place. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, kind_of(mode))
    return path


def kind_of(mode: int) -> str:
    """Name what is no regular file."""
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFLNK: "a link",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")


# Handle a stdout that accepts no more: a full disk, a closed pipe.


_OF_STREAMS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EPIPE,
    errno.EIO,
    errno.EBADF,
    errno.ENXIO,
)


@contextmanager
def one_line_if_not_printed() -> Iterator[None]:
    """End the process with status 1 if stdout takes no more: with one line, or none to a pipe.

    `zorse ... | head` is no mistake, and its reader has all that it wanted.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what is still in its buffer may be the first to fail
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_STREAMS:
            raise
        _drop_stdout()
        if error.errno != errno.EPIPE:
            line = f"zorse: error: stdout: found {error.strerror}; expected room for the output."
            with contextlib.suppress(OSError, AttributeError):
                print(line, remedy_for(error), file=sys.stderr, flush=True)
        sys.exit(1)


def _drop_stdout() -> None:
    """Let the interpreter's last flush succeed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
