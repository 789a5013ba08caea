"""Saves: a folder that is this job's alone while it trains, and a manifest with each of them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zorse_megatron.adapter.checkpoint.before_load import read_together
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.read_write import NotWritten, remedy_for
from zorse_megatron.files.writable import disk_problem
from zorse_megatron.live.checkpoint_check import LAST_OF_STOCK
from zorse_megatron.live.checkpoint_choice import newest_whole, what_is_saved
from zorse_megatron.live.checkpoint_files import (
    MANIFEST,
    STOCK_MANIFEST,
    FileRecord,
    Manifest,
    write_manifest,
)
from zorse_megatron.live.one_writer import OneWriter
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered, on_rank_0

# A manifest has sizes and checksums of files; it comes after them, and before the tracker.
#
# Every rank reads the files that it has written, which its node still has in memory; rank 0 reads
# the few others, and writes the manifest. A crash before that leaves a folder without one, to which
# the tracker does not point.


_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


def _make_save(stock_save: Callable[..., Any]) -> Callable[..., Any]:
    def save(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        folder = Path(str(checkpoint_dir))
        on_rank_0(partial(_open_again, folder))
        request = stock_save(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        finish = partial(write_together, folder)
        if request is None:
            finish()
        else:  # --async-save: after stock's own last steps, before the tracker's
            request.finalize_fns.append(finish)
        return request

    return save


def _open_again(folder: Path) -> None:
    """Let a folder that is about to be written over be none that is whole.

    Stock's own manifest goes, too: without --verify-integrity nothing would replace it.
    """
    for name in (MANIFEST, STOCK_MANIFEST, LAST_OF_STOCK):
        (folder / name).unlink(missing_ok=True)


def write_together(folder: Path) -> None:
    """Write the manifest of a checkpoint whose files are complete; a collective call.

    Raises OSError on every rank if one cannot read what it has written, or there is no room.
    """
    rank = dist.get_rank()
    mine = [path.name for path in folder.iterdir() if path.is_file() and _writer(path.name) == rank]
    records = read_together(folder, sorted(mine), Manifest.algorithm)
    files: dict[str, FileRecord] = {}
    for each in gathered(records):
        files |= each
    on_rank_0(partial(_write, folder, files))


def _write(folder: Path, files: dict[str, FileRecord]) -> None:
    try:
        write_manifest(folder, files)
    except NotWritten as error:
        cause = error.__cause__
        number, what = getattr(cause, "errno", None), getattr(cause, "strerror", None)
        raise OSError(number, what, str(folder / MANIFEST)) from error


def _writer(name: str) -> int | None:
    """The rank that has written a file; ranks that this job has not left theirs earlier."""
    if name == MANIFEST or name.endswith(".tmp"):
        return None
    shard = _SHARD.search(name)
    return 0 if shard is None else int(shard[1])


MANIFEST_HOOKS: Replacements = {"save_shards": _make_save}

# The folder of `--save`: this job's alone while it trains; and full, which stock does not say.


@contextmanager
def written_alone(folder: str | None, run: str) -> Iterator[Callable[[], None]]:
    """Keep other jobs from the folder during the block; a collective call.

    Yields what each save calls first, collectively, too. `run`: the name of an elastic job. Both
    raise CheckpointError on every rank where another job writes there, the first one also
    OutputError where nobody can. What the block raises because the disk is full is OutputError.
    """
    if folder is None or "://" in folder:
        yield lambda: None
        return
    taken: list[OneWriter] = []  # on rank 0

    def take() -> None:
        try:
            taken.append(OneWriter(Path(folder), run, tell=say))
        except OSError as error:
            raise OutputError.of(
                "nothing can be saved",
                where=f"--save {folder}",
                found=error.strerror or str(error),
                expected="a directory that takes files, or the place of one",
                remedy=remedy_for(error),
            ) from error

    def check() -> None:
        for each in taken:
            each.check()

    on_rank_0(take)
    try:
        yield partial(on_rank_0, check)
    except (Exception, CheckpointException) as error:
        if _is_of_writing(error) and (problem := _full_disk(folder)) is not None:
            raise OutputError("the checkpoint is not saved", [problem]) from error
        raise
    finally:
        for each in taken:
            each.release()


def _is_of_writing(error: BaseException) -> bool:
    """Whether stock's save may have met a full disk; it tells neither errno nor file."""
    said = str(error)
    return isinstance(error, (CheckpointException, OSError)) or "Worker failure" in said


def _full_disk(folder: str) -> Problem | None:
    """Say which disk, and how much it lacks; None: it takes more."""
    found = disk_problem(Path(folder))
    if found is None:
        return None
    said, disk, free_bytes, disk_bytes = found
    whole = newest_whole(folder)
    needs = "" if whole is None else f" for about {whole.num_bytes:,} bytes, as the last one has"
    return Problem(
        where=f"--save {folder}",
        found=f"{said}: {free_bytes:,} of {disk_bytes:,} bytes are free on the disk {disk}",
        expected=f"room{needs}",
        remedy=f"Make room there, or choose another path. "
        f"{what_is_saved(None if whole is None else whole.checkpoint.iteration)}",
    )
