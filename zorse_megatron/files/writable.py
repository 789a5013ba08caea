"""Checks that outputs can be written, before the work that makes them."""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.read_write import (
    EXPECTED,
    regular_target,
    remedy_for,
    stream_of,
    temporary_beside,
    write_all,
)

# Enough to find a full disk, which may still take empty files.
_PROBE = bytes(4096)


def refuse_unwritable(
    paths: Mapping[str, Path | None],
    *,
    inputs: Sequence[str | Path | None] = (),
    may_be_stream: bool = True,
) -> None:
    """Raise OutputError if a file could not be written. Option -> path; None: not asked for.

    `inputs`: files that the command reads, which none of them may replace; texts may be
    no paths at all. `may_be_stream`: whether it may be /dev/stdout and the like, from which nothing
    can be read back.
    """
    problems = list(unwritable_problems(paths, inputs=inputs, may_be_stream=may_be_stream))
    if problems:
        raise OutputError("the results could not be written", problems)


def unwritable_problems(
    paths: Mapping[str, Path | None],
    *,
    inputs: Sequence[str | Path | None] = (),
    may_be_stream: bool = True,
    parents: bool = False,
) -> Iterator[Problem]:
    """Yield what `refuse_unwritable` stops for. `parents`: make the directories of the files."""
    first: dict[object, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        where = f"{option} {path}"
        try:
            if parents:
                path.parent.mkdir(parents=True, exist_ok=True)
            identity = _identity(path, may_be_stream=may_be_stream)
        except OSError as error:
            yield _problem(where, error.strerror or str(error), remedy_for(error))
            continue
        other = first.setdefault(identity, where)
        if other != where:
            yield _problem(where, f"the file of {other}", "Give each a path of its own.")
        if any(_is_same(each, path) for each in inputs):
            yield _problem(where, "a file that this command reads", "Choose another path.")


def folder_problems(option: str, folder: Path, names: Iterable[str] = ()) -> Iterator[Problem]:
    """Make a directory, and yield why files of those names could not be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        yield _folder_problem(f"{option} {folder}", "a file")
        return
    except OSError as error:
        found = f"no directory that can be made ({error.strerror})"
        yield _folder_problem(f"{option} {folder}", found)
        return
    try:
        _probe(folder)
    except OSError as error:
        yield _folder_problem(f"{option} {folder}", error.strerror or str(error))
        return
    yield from unwritable_problems({f"{option}: {name}": folder / name for name in names})


_SAVE_PROBE = bytes(1 << 20)


def disk_problem(folder: Path) -> tuple[str, Path, int, int] | None:
    """Return why a folder takes no more; its disk, and the bytes that are free there and in all.

    None: it takes a file of 1 MiB, or fails for another reason than room, of which a quota and a
    lack of inodes are kinds.
    """
    try:
        with temporary_beside(folder / "any") as (descriptor, _):
            write_all(descriptor, _SAVE_PROBE)
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return None
        disk = Path(os.path.realpath(folder))
        while not os.path.ismount(disk):
            disk = disk.parent
        about = os.statvfs(disk)
        size = about.f_frsize
        said = error.strerror or str(error)
        return said, disk, about.f_bavail * size, about.f_blocks * size
    return None


def _identity(path: Path, *, may_be_stream: bool) -> object:
    """What a path leads to, equal for two paths to one file. Raises OSError as writing would."""
    descriptor = stream_of(path)
    if descriptor is not None:
        if not may_be_stream:
            raise OSError(errno.EINVAL, "a stream, from which nothing can be read back")
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "a stream that is open for reading only")
        return descriptor
    target = regular_target(path)
    _probe(target.parent)
    if target.exists():
        status = target.stat()
        return status.st_dev, status.st_ino
    return target


def _is_same(given: str | Path | None, path: Path) -> bool:
    """Whether two paths lead to one file. `given` may be any text."""
    exist = given is not None and os.path.exists(given) and os.path.exists(path)
    return exist and os.path.samefile(given, path)  # type: ignore[arg-type]


def _probe(directory: Path) -> None:
    try:
        with temporary_beside(directory / "any") as (descriptor, _):
            write_all(descriptor, _PROBE)
    except OSError as error:
        reason = f"a directory that takes no file ({error.strerror})"
        raise OSError(error.errno, reason) from error


def _problem(where: str, found: str, remedy: str) -> Problem:
    return Problem(where=where, found=found, expected=EXPECTED, remedy=remedy)


def _folder_problem(where: str, found: str) -> Problem:
    return Problem(
        where=where,
        found=found,
        expected="a directory, or nothing, where files can be made",
        remedy="Choose another path.",
    )
