"""The folder of `--save`: its checkpoints, and the tracker file that names the latest.

Sources of the layout: `get_checkpoint_name`, `get_checkpoint_tracker_filename` and `read_metadata`
in `megatron.training.checkpointing`.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.files.write import write_text

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
