"""The folder of `--save`: its checkpoints, their files with sizes and checksums, the tracker.

Sources of the layout: `get_checkpoint_name`, `get_checkpoint_tracker_filename` and `read_metadata`
in `megatron.training.checkpointing`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from zorse_megatron.errors import Problem
from zorse_megatron.files.read_write import write_text

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")
_NUMBER = re.compile(r"[0-9]{1,18}")
_LONGEST_QUOTE = 40
_LARGEST_TRACKER_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint in a folder of `--save`; it need not exist."""

    root: Path
    iteration: int
    is_release: bool = False

    @property
    def folder(self) -> Path:
        """Where its files are."""
        name = _RELEASE if self.is_release else f"iter_{self.iteration:07d}"
        return self.root / name

    def __str__(self) -> str:
        return "the release" if self.is_release else f"iteration {self.iteration}"


def checkpoints_in(root: Path) -> list[Checkpoint]:
    """Find the folders of iterations, newest first. Raises OSError."""
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        name = _ITERATION.fullmatch(path.name)
        if name is not None and path.is_dir():
            checkpoint = Checkpoint(root=root, iteration=int(name[1]))
            if checkpoint.folder.name == path.name:
                found.append(checkpoint)
    return sorted(found, key=lambda checkpoint: -checkpoint.iteration)


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """What a tracker file says."""

    path: Path
    exists: bool
    names: Checkpoint | None = None
    """None: nothing that is the name of a checkpoint."""
    text: str = ""

    @property
    def found(self) -> str:
        """What is in it, for people."""
        if not self.exists:
            return "no such file"
        return f'"{self.text}"' if self.text else "nothing in it"


def read_tracker(root: Path) -> Tracker:
    """Read the tracker file of a folder. Raises OSError."""
    path = root / TRACKER
    if not path.is_file():
        return Tracker(path=path, exists=False)
    with path.open("rb") as file:
        data = file.read(_LARGEST_TRACKER_BYTES)
    text = data.decode(errors="replace").strip()
    names = None
    if text == _RELEASE:
        names = Checkpoint(root=root, iteration=0, is_release=True)
    elif _NUMBER.fullmatch(text):
        names = Checkpoint(root=root, iteration=int(text))
    quoted = "".join(each if each.isprintable() else "?" for each in text[:_LONGEST_QUOTE])
    return Tracker(path=path, exists=True, names=names, text=quoted)


def set_tracker(checkpoint: Checkpoint) -> None:
    """Make a checkpoint the one from which training resumes. Raises NotWritten."""
    write_text(checkpoint.root / TRACKER, str(checkpoint.iteration))


# The manifest of a checkpoint: name, size and checksum of each of its files.
#
# It is the last file of a save, written before the tracker file names the checkpoint, and put in
# place in one step: a folder that has one was saved to its end. Stock Megatron does not read it.
# Where there is none, stock's own `integrity.json` is (`--verify-integrity`, SHA-256, no sizes).
#
# The checksum is XXH3 with 128 bits: it is for damage, not for forgery, and costs less than
# reading.


MANIFEST = "zorse-manifest.json"
STOCK_MANIFEST = "integrity.json"
_VERSION = 1
_XXH3 = "xxh3_128"
_ALGORITHMS: dict[str, Callable[[], Any]] = {_XXH3: xxhash.xxh3_128, "sha256": hashlib.sha256}
_PIECE_BYTES = 1 << 22
_LARGEST_MANIFEST_BYTES = 1 << 28
RESTORE = "Restore it from a copy."


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Expected size and checksum of a file."""

    checksum: str
    num_bytes: int | None = None
    """None: not known, from stock's manifest."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of one checkpoint, by their names in its folder."""

    files: Mapping[str, FileRecord]
    algorithm: str = _XXH3
    name: str = MANIFEST


class ManifestError(ValueError):
    """A manifest that says nothing: `problem` tells why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Hashing:
    """The checksum of one file, in pieces, so that others need not wait for all of it."""

    def __init__(self, path: Path, algorithm: str = _XXH3) -> None:
        self.path = path
        self.num_bytes = 0
        self._sum = _ALGORITHMS[algorithm]()

    def pieces(self) -> Iterator[int]:
        """Read the file, and yield the size of each piece once it is counted in, in bytes.

        Raises OSError.
        """
        with self.path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_PIECE_BYTES))
            while count := file.readinto(buffer):
                self._sum.update(buffer[:count])
                self.num_bytes += count
                yield count

    def record(self) -> FileRecord:
        """Return what has been read."""
        return FileRecord(checksum=self._sum.hexdigest(), num_bytes=self.num_bytes)


def file_record(path: Path, algorithm: str = _XXH3) -> FileRecord:
    """Read a whole file. Raises OSError."""
    hashing = Hashing(path, algorithm)
    for _ in hashing.pieces():
        pass
    return hashing.record()


def write_manifest(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Put the manifest of a complete checkpoint in place. Raises NotWritten."""
    listed = {
        name: {"bytes": record.num_bytes, "checksum": record.checksum}
        for name, record in sorted(files.items())
    }
    value = {
        "version": _VERSION,
        "algorithm": _XXH3,
        "files": listed,
        "checksum_of_files": _checksum(listed),
    }
    write_text(folder / MANIFEST, json.dumps(value, indent=1) + "\n")


def _checksum(listed: Any) -> str:
    """Checksum of the list itself, so that damage to it is not taken for damage to a file."""
    return str(xxhash.xxh3_128(json.dumps(listed, sort_keys=True).encode()).hexdigest())


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, ours or stock's; None where there is none.

    Raises ManifestError for one that cannot be read as such, OSError.
    """
    for name, parse in ((MANIFEST, _parse), (STOCK_MANIFEST, _parse_stock)):
        path = folder / name
        try:
            with path.open("rb") as file:
                data = file.read(_LARGEST_MANIFEST_BYTES + 1)
        except FileNotFoundError:
            continue
        try:
            manifest = parse(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ManifestError(_bad_manifest(path, error)) from error
        return manifest
    return None


def _parse(value: Any) -> Manifest:
    if value["version"] != _VERSION:
        raise ValueError(f"version {value['version']!r}, not {_VERSION}")
    files = {
        _checked_name(name): FileRecord(
            checksum=_checked(str, record["checksum"]), num_bytes=_checked(int, record["bytes"])
        )
        for name, record in value["files"].items()
    }
    if value["checksum_of_files"] != _checksum(value["files"]):
        raise ValueError("its own checksum is another one")
    return _complete(Manifest(files=files, algorithm=_known(value["algorithm"])))


def _parse_stock(value: Any) -> Manifest:
    """Source of the layout: `save_integrity_manifest` in `dist_checkpointing.validation`."""
    files = {
        _checked_name(name): FileRecord(checksum=_checked(str, checksum))
        for name, checksum in value["files"].items()
    }
    algorithm = _known(value["algorithm"])
    return _complete(Manifest(files=files, algorithm=algorithm, name=STOCK_MANIFEST))


def _complete(manifest: Manifest) -> Manifest:
    if not manifest.files:
        raise ValueError("no files")
    return manifest


def _known(algorithm: Any) -> str:
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"the unknown algorithm {algorithm!r}")
    return str(algorithm)


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where a {kind.__name__} belongs")
    return value


def _checked_name(name: str) -> str:
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        raise ValueError(f"the file name {name!r}")
    return name


def _bad_manifest(path: Path, error: Exception) -> Problem:
    text = f"no {error}" if isinstance(error, KeyError) else str(error)
    return Problem(
        where=str(path),
        found=f"no manifest that can be read ({text})",
        expected="the sizes and checksums of the checkpoint's files",
        remedy="Restore it from a copy. Without it, the checkpoint is loaded unverified.",
    )
