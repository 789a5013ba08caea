"""A new folder of weights: complete, or nothing of it."""

import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from zorse_megatron.errors import ModelError, OutputError, Problem
from zorse_megatron.files.read_write import remedy_for
from zorse_megatron.files.writable import disk_problem, folder_problems

_UNFINISHED = "unfinished import or export of zorse"


@contextmanager
def all_or_nothing(folder: Path, option: str, *, last: str) -> Iterator[None]:
    """Make the folder; if the block ends with an error, leave nothing in it, nor what was made.

    `last`: the file by which others know the folder, which the block replaces at its end. After
    SIGKILL it still says that the rest is unfinished: Megatron refuses such a tracker file, and
    transformers such a config.json. Raises OutputError where the folder cannot be used.
    """
    clear = partial(_clear, folder, _prepared(folder, option, last))
    try:
        (folder / last).write_text(_UNFINISHED)
        yield
    except (OSError, RuntimeError) as error:
        failure = _not_written(folder, error)  # before there is room again
        clear()
        raise failure from error
    except SafetensorError as error:
        clear()
        problem = Problem(
            where=str(folder), found=str(error), expected="tensors", remedy="Import it again."
        )
        raise ModelError("The model changed while it was read", [problem]) from error
    except BaseException:
        clear()
        raise


def _prepared(folder: Path, option: str, last: str) -> list[Path]:
    """Make the folder; the directories that there were not, from it outwards.

    Raises OutputError where it holds anything or takes no files.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    problems = list(folder_problems(option, folder))
    if not problems and (names := sorted(path.name for path in folder.iterdir())):
        found, remedy = f"a directory that is not empty ({names[0]})", "Choose another path."
        if _is_unfinished(folder / last):
            found = "what an import or export that was killed, or still runs, has written"
            remedy = f"If none runs, remove it: rm -r {shlex.quote(str(folder))}"
        expected = "a new directory, or an empty one"
        where = f"{option} {folder}"
        problems.append(Problem(where=where, found=found, expected=expected, remedy=remedy))
    if problems:
        _remove(made)
        raise OutputError("the results could not be written", problems)
    return made


def _is_unfinished(path: Path) -> bool:
    with suppress(OSError):
        return path.is_file() and path.read_bytes() == _UNFINISHED.encode()
    return False


def _clear(folder: Path, made: Sequence[Path]) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    _remove(made)


def _remove(made: Sequence[Path]) -> None:
    for each in made:
        with suppress(OSError):  # it may not be there, or others use it
            each.rmdir()


def _not_written(folder: Path, error: BaseException) -> OutputError:
    full = disk_problem(folder)
    if full is not None:
        said, disk, free_bytes, disk_bytes = full
        found = f"{said}: {free_bytes:,} of {disk_bytes:,} bytes are free on the disk {disk}"
    else:
        found = str(getattr(error, "strerror", None) or error).partition("\n")[0]
    remedy = remedy_for(error) if isinstance(error, OSError) else "Make room there."
    problem = Problem(
        where=str(folder), found=found, expected="room for all weights", remedy=remedy
    )
    return OutputError("the weights are not written", [problem])
