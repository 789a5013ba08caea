"""A manifest with each save: sizes and checksums of files, after them, before the tracker.

Every rank reads the files that it has written, which its node still has in memory; rank 0 reads the
few others, and writes the manifest. A crash before that leaves a folder without one, to which the
tracker does not point.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zorse_megatron.adapter.checkpoint.before_load import read_together
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.files.read_write import NotWritten
from zorse_megatron.live.checkpoint_check import LAST_OF_STOCK
from zorse_megatron.live.checkpoint_files import (
    MANIFEST,
    STOCK_MANIFEST,
    FileRecord,
    Manifest,
    write_manifest,
)
from zorse_megatron.runtime.collectives import gathered, on_rank_0

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
