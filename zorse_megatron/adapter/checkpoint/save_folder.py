"""The folder of `--save` is this job's alone while it trains."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from zorse_megatron.errors import OutputError, Problem
from zorse_megatron.files.read_write import remedy_for
from zorse_megatron.live.one_writer import OneWriter
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import on_rank_0


@contextmanager
def written_alone(folder: str | None, run: str) -> Iterator[Callable[[], None]]:
    """Keep other jobs from the folder during the block; a collective call.

    Yields what each save calls first, collectively, too. `run`: the name of an elastic job. Both
    raise CheckpointError on every rank where another job writes there, the first one also
    OutputError where nobody can.
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
            raise OutputError("nothing could be saved", [problem]) from error

    def check() -> None:
        for each in taken:
            each.check()

    on_rank_0(take)
    try:
        yield partial(on_rank_0, check)
    finally:
        for each in taken:
            each.release()
