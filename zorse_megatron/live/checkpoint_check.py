"""Checks that a checkpoint is complete: by names and sizes, or by checksums."""

import contextlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.files.inert_pickle import InertUnpickler
from zorse_megatron.live.checkpoint_files import (
    RESTORE,
    Checkpoint,
    FileRecord,
    Manifest,
    ManifestError,
    Tracker,
    checkpoints_in,
    file_record,
    read_manifest,
    read_tracker,
)

LAST_OF_STOCK = "metadata.json"
"""The file that stock writes last: a folder without it was cut short."""
_OTHER_FORMAT = "mp_rank_*"


class State(Enum):
    """What is known of a checkpoint."""

    WHOLE = "whole"
    UNVERIFIED = "unverified"
    """Complete as far as sizes tell; no manifest says more."""
    DAMAGED = "damaged"
    CUT_SHORT = "cut short"
    """Its save did not come to its end."""
    OTHER_FORMAT = "of another format"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What names and sizes say of a checkpoint."""

    checkpoint: Checkpoint
    state: State
    problems: tuple[Problem, ...] = ()
    manifest: Manifest | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """File -> bytes, as found."""
    is_read: bool = False
    """Whether the content of its files has been compared with the manifest, too."""

    @property
    def is_usable(self) -> bool:
        """Whether training could resume from it."""
        return self.state in (State.WHOLE, State.UNVERIFIED)

    @property
    def num_bytes(self) -> int:
        """The bytes of all of its files."""
        return sum(self.sizes.values())


def look_at(checkpoint: Checkpoint) -> Look:
    """Compare the names and sizes of a checkpoint's files with what they must be.

    Reads the manifest or `.metadata`, and no other file. Raises OSError for what it may not read.
    """
    folder = checkpoint.folder
    if not folder.is_dir():
        problem = _problem(folder, "no such folder", "the folder of a checkpoint", RESTORE)
        return Look(checkpoint=checkpoint, state=State.DAMAGED, problems=(problem,))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return Look(
            checkpoint=checkpoint, state=State.DAMAGED, problems=(error.problem,), sizes=sizes
        )
    if manifest is not None:
        problems = with_cause(folder, manifest, size_problems(folder, manifest, sizes))
        listed = {name: size for name, size in sizes.items() if name in manifest.files}
        state = State.DAMAGED if problems else State.WHOLE
        return Look(
            checkpoint=checkpoint, state=state, problems=problems, manifest=manifest, sizes=listed
        )
    state, problems = _without_manifest(folder, sizes)
    return Look(checkpoint=checkpoint, state=state, problems=problems, sizes=sizes)


def size_problems(
    folder: Path, manifest: Manifest, sizes: Mapping[str, int]
) -> tuple[Problem, ...]:
    """What is missing or has another size; `sizes`: file -> bytes, as found."""
    problems = []
    for name, record in manifest.files.items():
        if name not in sizes:
            problems.append(_missing(folder / name, manifest.name))
        elif record.num_bytes not in (None, sizes[name]):
            problems.append(
                _problem(
                    folder / name,
                    f"{sizes[name]} bytes",
                    f"{record.num_bytes} bytes, as {manifest.name} says",
                    RESTORE,
                )
            )
    return tuple(problems)


def content_problem(
    folder: Path, name: str, manifest: Manifest, found: FileRecord | None
) -> Problem | None:
    """Compare what has been read of a file (None: it is missing) with the manifest."""
    expected = manifest.files[name]
    if found is None:
        return _missing(folder / name, manifest.name)
    if found.checksum == expected.checksum:
        return None
    return _problem(
        folder / name,
        f"{manifest.algorithm} {found.checksum}",
        f"{expected.checksum}, as {manifest.name} says: its bytes have changed since they were "
        "saved",
        RESTORE,
    )


def with_cause(
    folder: Path, manifest: Manifest, problems: Sequence[Problem]
) -> tuple[Problem, ...]:
    """What does not fit the manifest; the last problem says so if the manifest may be too old.

    Stock neither writes our manifest nor removes it from a folder that it saves into again.
    """
    try:
        written_ns, saved_ns = (
            (folder / name).stat().st_mtime_ns for name in (manifest.name, LAST_OF_STOCK)
        )
    except OSError:
        return tuple(problems)
    if not problems or written_ns >= saved_ns:
        return tuple(problems)
    *others, last = problems
    cause = (
        f"But {manifest.name} is older than {LAST_OF_STOCK}, so it may be of an earlier save: if "
        "Megatron has saved this iteration again since, without a plan, remove "
        f"{folder / manifest.name}; the checkpoint is then loaded as one without a manifest."
    )
    return (*others, replace(last, remedy=f"{last.remedy} {cause}"))


def shares(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Deal files out to `count` readers so that all have about the same bytes to read."""
    dealt: list[list[str]] = [[] for _ in range(count)]
    loads = [0] * count
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        dealt[least].append(name)
        loads[least] += sizes[name]
    return tuple(map(tuple, dealt))


def _without_manifest(folder: Path, sizes: Mapping[str, int]) -> tuple[State, tuple[Problem, ...]]:
    """A checkpoint of stock's, or one whose save ended before its manifest."""
    if LAST_OF_STOCK not in sizes:
        if any(folder.glob(_OTHER_FORMAT)):
            return State.OTHER_FORMAT, (_other_format(folder),)
        found = f"no {LAST_OF_STOCK}, which is written last: the save was cut short"
        problem = _problem(folder, found, "a checkpoint that was saved to its end", _GO_BACK)
        return State.CUT_SHORT, (problem,)
    problems = tuple(_structure_problems(folder, sizes))
    return (State.DAMAGED if problems else State.UNVERIFIED), problems


def _structure_problems(folder: Path, sizes: Mapping[str, int]) -> Iterator[Problem]:
    path = folder / LAST_OF_STOCK
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError):
        backend = None
    if not isinstance(backend, str):
        yield _problem(path, "no JSON with sharded_backend", "what Megatron writes", RESTORE)
    if METADATA not in sizes:
        yield _missing(folder / METADATA, LAST_OF_STOCK)
        return
    try:
        least = least_bytes(folder)
    except MetadataError as error:
        yield _problem(
            folder / METADATA, f"no description of tensors ({error})", "one of torch's", RESTORE
        )
        return
    for name, num_bytes in sorted(least.items()):
        if name not in sizes:
            yield _missing(folder / name, METADATA)
        elif sizes[name] < num_bytes:
            expected = f"at least {num_bytes} bytes, as {METADATA} says"
            yield _problem(folder / name, f"{sizes[name]} bytes", expected, RESTORE)


_GO_BACK = "Its folder may be removed."


def _missing(path: Path, listed_in: str) -> Problem:
    return _problem(path, "no such file", f"it, as {listed_in} lists it", RESTORE)


def _other_format(folder: Path) -> Problem:
    return _problem(
        folder,
        "a checkpoint in Megatron's old torch format",
        "one in torch_dist, which a plan can read",
        "Convert it with stock Megatron and --ckpt-convert-format torch_dist.",
    )


def _problem(where: Path, found: str, expected: str, remedy: str) -> Problem:
    return Problem(where=str(where), found=found, expected=expected, remedy=remedy)


# Reads whole checkpoints on one machine, as many files at a time as it has cores.


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


# How large the files of a torch_dist checkpoint must be at least, as its `.metadata` says.
#
# The file is a pickle of torch's classes. It is read here without torch, and without running
# anything that it names: whatever class it asks for becomes an empty stand-in.


METADATA = ".metadata"
_READ_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    ImportError,
    MemoryError,
    OverflowError,
    RecursionError,
)


class MetadataError(ValueError):
    """The file is not what torch writes."""


def least_bytes(folder: Path) -> dict[str, int]:
    """Map each file with tensors or objects to the end of the last one in it, in bytes.

    Raises MetadataError where `.metadata` cannot be read as torch's, OSError.
    """
    found: dict[str, int] = {}
    with _index(folder) as index:
        for entry in index.storage_data.values():
            end = int(entry.offset) + int(entry.length)
            name = str(entry.relative_path)
            found[name] = max(found.get(name, 0), end)
    if not found:
        raise MetadataError("it lists no tensors")
    return found


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Map the name of each whole tensor to its shape, of one that has layers stacked with these.

    Raises MetadataError where `.metadata` cannot be read as torch's, OSError.
    """
    with _index(folder) as index:
        entries = index.state_dict_metadata.items()
        sizes = {name: entry.size for name, entry in entries if hasattr(entry, "size")}
        return {name: tuple(map(int, size.arguments[0])) for name, size in sizes.items()}


@contextlib.contextmanager
def _index(folder: Path) -> Iterator[Any]:
    """What `.metadata` has; raises MetadataError for what is read of it, too."""
    with (folder / METADATA).open("rb") as file:
        try:
            yield InertUnpickler(file).load()
        except _READ_ERRORS as error:
            raise MetadataError(f"{type(error).__name__}: {error}") from error
