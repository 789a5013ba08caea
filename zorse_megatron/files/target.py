"""What an output path resolves to: a regular file, or an open stream."""

import errno
import os
import re
import stat
from pathlib import Path

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


def kind_of(mode: int) -> str:
    """Name what is no regular file."""
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")
