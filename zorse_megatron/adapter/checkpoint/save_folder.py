"""The folder of `--save`: this job's alone while it trains; and full, which stock does not say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.read_write import remedy_for
from zorse_megatron.files.writable import disk_problem
from zorse_megatron.live.checkpoint_choice import newest_whole, what_is_saved
from zorse_megatron.live.one_writer import OneWriter
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import on_rank_0


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
            problem = Problem(
                where=f"--save {folder}",
                found=error.strerror or str(error),
                expected="a directory that takes files, or the place of one",
                remedy=remedy_for(error),
            )
            raise OutputError("nothing can be saved", [problem]) from error

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
