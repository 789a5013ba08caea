"""Reads whole checkpoints on one machine, as many files at a time as it has cores."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from zorse_megatron.checkpoints.check import Look, State, content_problem, look_at, with_cause
from zorse_megatron.checkpoints.folder import Tracker, checkpoints_in, read_tracker
from zorse_megatron.checkpoints.manifest import FileRecord, file_record


def read_through(look: Look) -> Look:
    """Compare the content of a checkpoint's files with its manifest, if it has one.

    Raises OSError for what cannot be read.
    """
    manifest, folder = look.manifest, look.checkpoint.folder
    if manifest is None or not look.is_usable:
        return look

    def read(name: str) -> FileRecord | None:
        try:
            return file_record(folder / name, manifest.algorithm)
        except FileNotFoundError:
            return None

    names = sorted(look.sizes, key=lambda name: -look.sizes[name])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(read, names))
    problems = [
        problem
        for name, record in zip(names, found, strict=True)
        if (problem := content_problem(folder, name, manifest, record)) is not None
    ]
    if problems:
        causes = with_cause(folder, manifest, problems)
        return replace(look, state=State.DAMAGED, problems=causes)
    return replace(look, is_read=True)


def verify(
    root: Path, *, reads: Callable[[Sequence[Look], Look], bool]
) -> tuple[Tracker, list[Look]]:
    """Look at all checkpoints of a folder of `--save`, newest first.

    `reads(looks so far, this one)` says which to read through. Raises OSError.
    """
    tracker = read_tracker(root)
    listed = checkpoints_in(root)
    if tracker.names is not None and tracker.names not in listed:
        listed.insert(0, tracker.names)
    looks: list[Look] = []
    for checkpoint in listed:
        look = look_at(checkpoint)
        looks.append(read_through(look) if reads(looks, look) else look)
    return tracker, looks
