"""Small checkpoints, written as Megatron and the plugin write them, and damaged at will."""

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.live.checkpoint_files import (
    MANIFEST,
    TRACKER,
    Checkpoint,
    file_record,
    write_manifest,
)


@dataclass(frozen=True)
class StorageInfo:
    """Fields of torch's `_StorageInfo` in `.metadata`."""

    relative_path: str
    offset: int
    length: int


@dataclass(frozen=True)
class Metadata:
    """The field of torch's `Metadata` that is read."""

    storage_data: Mapping[str, StorageInfo]


def shards(iteration: int) -> dict[str, bytes]:
    return {
        "__0_0.distcp": bytes((iteration + n) % 256 for n in range(700)),
        "__1_0.distcp": bytes((iteration * n) % 256 for n in range(90)),
    }


def steps_of_save(root: Path, iteration: int) -> Iterator[str]:
    """Save a checkpoint, and yield wherever a crash may come."""
    checkpoint = Checkpoint(root=root, iteration=iteration)
    folder = checkpoint.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in (MANIFEST, "metadata.json"):
        (folder / name).unlink(missing_ok=True)
        yield f"no {name} of an earlier save"
    contents = shards(iteration)
    for name, content in contents.items():
        (folder / name).write_bytes(content[: len(content) // 2])
        yield f"half of {name}"
        (folder / name).write_bytes(content)
        yield name
    infos = {
        name: StorageInfo(relative_path=name, offset=10, length=len(content) - 10)
        for name, content in contents.items()
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(storage_data=infos)))
    yield ".metadata"
    (folder / "metadata.json").write_text("")
    yield "empty metadata.json"
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    yield "metadata.json"
    (folder / f".{MANIFEST}.tmp").write_text("{")
    yield "draft of the manifest"
    write_manifest(
        folder,
        {
            path.name: file_record(path)
            for path in folder.iterdir()
            if not path.name.startswith(f".{MANIFEST}")
        },
    )
    yield "manifest"
    (root / TRACKER).write_text("")
    yield "empty tracker"
    (root / TRACKER).write_text(str(iteration))
    yield "tracker"


def save(root: Path, iteration: int) -> Checkpoint:
    for _ in steps_of_save(root, iteration):
        pass
    return Checkpoint(root=root, iteration=iteration)


def flip(path: Path, position: int = 5, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1 << bit
    path.write_bytes(data)
