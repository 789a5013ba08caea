"""All ranks read a checkpoint's files together: each file once, by one rank.

A rank may have much more to read than another one. So that no collective call waits for longer than
its timeout, all ranks exchange their progress after each part.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zorse_megatron.checkpoints.manifest import FileRecord, Hashing
from zorse_megatron.errors import ZorseError
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered

_BYTES_BETWEEN_EXCHANGES = 1 << 30
_PROGRESS_INTERVAL_S = 10.0


def read_together(
    folder: Path, names: Sequence[str], algorithm: str, *, total_bytes: int | None = None
) -> dict[str, FileRecord | None]:
    """Read `names`, this rank's share of a checkpoint; a collective call of all ranks.

    Returns file -> what it is, None for one that is missing. `total_bytes`: of all ranks; with it,
    rank 0 says how far they are. Raises OSError on every rank if one cannot read.
    """
    hashings = {name: Hashing(folder / name, algorithm) for name in names}
    missing: set[str] = set()
    pieces = _pieces(hashings, missing)
    num_bytes, failure, is_done = 0, None, False
    last_said_s = time.monotonic()
    while True:
        try:
            count, is_done = _some(pieces)
            num_bytes += count
        except OSError as error:
            failure = (error.errno, error.strerror, str(error.filename or folder))
        everyone = gathered((is_done, num_bytes, failure))
        failures = [each[2] for each in everyone if each[2] is not None]
        if failures:
            raise OSError(*failures[0])
        if all(each[0] for each in everyone):
            break
        if total_bytes is not None and time.monotonic() - last_said_s > _PROGRESS_INTERVAL_S:
            last_said_s = time.monotonic()
            read_bytes = sum(each[1] for each in everyone)
            say(f"{folder}: {read_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB are checked")
    return {
        name: None if name in missing else hashing.record() for name, hashing in hashings.items()
    }


def on_rank_0(decide: Callable[[], Any]) -> Any:
    """Let rank 0 decide for all; a collective call. What it raises is raised on every rank."""
    decision: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            decision[0] = decide()
        except (ZorseError, OSError) as error:
            decision[1] = error
    dist.broadcast_object_list(decision, src=0)
    if decision[1] is not None:
        raise decision[1]
    return decision[0]


def _pieces(hashings: dict[str, Hashing], missing: set[str]) -> Iterator[int]:
    for name, hashing in hashings.items():
        try:
            yield from hashing.pieces()
        except FileNotFoundError:
            missing.add(name)


def _some(pieces: Iterator[int]) -> tuple[int, bool]:
    """Read until the next exchange; returns bytes, and whether nothing is left."""
    num_bytes = 0
    for count in pieces:
        num_bytes += count
        if num_bytes >= _BYTES_BETWEEN_EXCHANGES:
            return num_bytes, False
    return num_bytes, True
