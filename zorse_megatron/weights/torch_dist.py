"""Megatron's `torch_dist` checkpoints, written and read tensor by tensor, without Megatron.

They are checkpoints of torch.distributed.checkpoint (DCP) with a `metadata.json`. Sources:
`TorchDistSaveShardedStrategy` and `load_common_state_dict` in `megatron.core.dist_checkpointing`.
"""

import io
import json
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zorse_megatron.files.inert_pickle import InertUnpickler
from zorse_megatron.weights.names import StatefulModule, WholeTensor

CONFIG = "metadata.json"
_OF_A_MODEL = ("embedding.", "decoder.", "output_layer.")
_COMMON = "common_state/shard_0_1"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A tensor to write, made when it is its turn."""

    tensor: WholeTensor
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def write_checkpoint(
    folder: Path,
    tensors: Iterable[Written],
    *,
    common: Mapping[str, Any],
    modules: Sequence[StatefulModule],
) -> None:
    """Write a checkpoint of weights alone into a folder; `metadata.json` is its last file.

    `common`: what is no tensor; of types that `torch.load` takes with `weights_only`. Raises what
    making a tensor raises, OSError, and RuntimeError where torch cannot write.
    """
    planner = _Saving([(_item(each), each.make) for each in tensors], _bytes_of(common, modules))
    # One thread and no look-ahead: no more than a few tensors are in memory.
    writer = dcp.FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as error:  # its text is a traceback
            raise next(iter(error.failures.values()))[0] from error
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / CONFIG).write_text(json.dumps(config))


# Reading.
#
# The archives are what `torch.save` has written: a zip file with a pickle and, not compressed, the
# bytes of each tensor. Nothing of them is run, and only what is asked for is read. Sources: `_save`
# in `torch.serialization`, `_rebuild_tensor_v2` in `torch._utils`.

_MOST_OPEN = 256
"""Archives whose lists of contents are kept: pieces of one tensor are read one after another."""
_LOCAL_HEADER = struct.Struct("<26xHH")


class Archive:
    """Bytes that are an archive, such as a part of a mapped file; of them, only what is looked at
    is read.

    Methods raise OSError, and whatever bytes that are none make pickle, numpy and zipfile raise.
    """

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._data = data
        self._zip = ZipFile(_Bytes(memoryview(self._data)))
        self._root = self._zip.namelist()[0].partition("/")[0]

    def value(self) -> Any:
        """Return what was saved; all but plain values is a `StandIn`."""
        with self._zip.open(f"{self._root}/data.pkl") as file:
            return InertUnpickler(file).load()

    def box(self, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a block of the tensor that was saved."""
        (_, _, name, *_), first, shape, strides, *_ = self._tensor
        record = self._zip.getinfo(f"{self._root}/data/{name}")
        stops = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        is_larger = any(stop > there for stop, there in zip(stops, shape, strict=True))
        if record.compress_type != ZIP_STORED or is_larger:
            raise OSError(f"a tensor of {tuple(shape)}, shorter than {tuple(stops)}")
        start = record.header_offset + _LOCAL_HEADER.size
        header = self._data[record.header_offset : start].tobytes()
        start += sum(_LOCAL_HEADER.unpack(header))
        size = dtype.itemsize
        whole: np.ndarray[Any, Any] = np.ndarray(
            shape,
            f"i{size}",
            self._data[start : start + record.file_size],
            first * size,
            [each * size for each in strides],
        )
        block = whole[tuple(slice(a, b) for a, b in zip(offsets, stops, strict=True))].copy()
        return torch.from_numpy(block).view(dtype)

    @cached_property
    def _tensor(self) -> tuple[Any, ...]:
        """What it is made of: storage, offset, shape, strides, and more."""
        found: tuple[Any, ...] = self.value().arguments
        return found


class _Bytes(io.RawIOBase):
    """Bytes as a file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Return where it is read next."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read elsewhere next."""
        self._at = offset + {io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}.get(whence, 0)
        if self._at < 0:
            raise OSError("before its start")
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read that many bytes, or all that are left."""
        end = len(self._data) if size is None or size < 0 else self._at + size
        part = bytes(self._data[self._at : end])
        self._at += len(part)
        return part


class CheckpointTensors:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read its index. Raises OSError, and whatever an index that is none makes pickle raise."""
        self.folder = folder
        metadata = dcp.FileSystemReader(folder).read_metadata()
        self._files: dict[str, np.memmap[Any, np.dtype[np.uint8]]] = {}
        self._archive = lru_cache(_MOST_OPEN)(self._opened)
        self._at: dict[tuple[str, int], Mapping[tuple[int, ...], list[Any]]] = {}
        self._entries: Mapping[str, Any] = metadata.state_dict_metadata
        self._places: Mapping[MetadataIndex, Any] = metadata.storage_data

    def found(self, tensor: WholeTensor) -> tuple[int, ...] | None:
        """Return the shape that the tensor has there; None: it is not there.

        It is that of all that is stacked where as many are not as should be.
        """
        entry = self._entry(tensor)
        if entry is None:
            return None
        size, depth = tuple(entry.size), len(self._place(tensor))
        is_whole = all(tensor.stack[axis] == there for axis, there in self.stack(tensor).items())
        return size[depth:] if is_whole else size

    def stack(self, tensor: WholeTensor) -> dict[str, int]:
        """Return how many layers and experts are stacked there, as far as they are."""
        depth = len(self._place(tensor))
        axes = list(tensor.stack)[len(tensor.stack) - depth :]
        return dict(zip(axes, map(int, self._entry(tensor).size[:depth]), strict=False))

    def dtype(self, tensor: WholeTensor) -> torch.dtype:
        """Return the type that a tensor has there."""
        kind: torch.dtype = self._entry(tensor).properties.dtype
        return kind

    def others(self, tensors: Iterable[WholeTensor]) -> list[str]:
        """Return the tensors of a model there that are none of these."""
        known = {key for each in tensors for key in (*each.keys, *each.keys_of_layer)}
        return [key for key in self.sizes() if key not in known]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a model there, with their shapes; stacked ones with all layers."""
        return {
            key: tuple(entry.size)
            for key, entry in self._entries.items()
            if key.startswith(_OF_A_MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def has(self, start: str) -> bool:
        """Return whether the name of anything there begins so."""
        return any(key.startswith(start) for key in self._entries)

    def misplaced(self) -> Iterator[tuple[str, str]]:
        """Yield what has bytes outside its file, or of another: its key, and which bytes."""
        places = defaultdict(list)
        for index, place in self._places.items():
            stop = place.offset + place.length
            places[place.relative_path].append((place.offset, stop, index.fqn))
        for name, found in places.items():
            path = self.folder / name
            size = path.stat().st_size if path.is_file() else -1
            there = f"ends at {size:,}" if size >= 0 else "is not there"
            end, other = 0, ""
            for start, stop, key in sorted(found):
                span = f"bytes {start:,} to {stop:,} of {name}"
                if not 0 <= start <= stop <= size:
                    yield key, f"{span}, which {there}"
                    continue
                if start < end:
                    yield key, f"{span}, some of which are those of {other}"
                if stop > end:
                    end, other = stop, key

    def common(self) -> Any:
        """Return what Megatron saved beside tensors; all but plain values is a `StandIn`.

        Raises OSError, and whatever an archive that is none makes pickle and zipfile raise.
        """
        return self._archive(MetadataIndex(_COMMON)).value()[0]

    def read(self, tensor: WholeTensor) -> torch.Tensor:
        """Read the rows that stand for something. Raises as `common`."""
        place, rest = self._place(tensor), tensor.shape
        offsets, sizes = (*place, *(0 for _ in rest)), (*(1 for _ in place), *rest)
        return self.read_box(self._key(tensor), offsets, sizes, depth=len(place)).view(rest)

    def read_box(
        self, key: str, offsets: Sequence[int], sizes: Sequence[int], *, depth: int = 0
    ) -> torch.Tensor:
        """Read a block of a tensor, and of files no more than it. Raises as `common`.

        `depth`: at one place of how many of the first axes it is.
        """
        entry = self._entries[key]
        target = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
        for item in self._items(key, offsets, target.shape, depth=depth):
            archive = self._archive(item.storage_index)
            part = archive.box(item.storage_offsets, item.lengths, target.dtype)
            _place_of(item, target).copy_(part)
        return target

    def _opened(self, index: MetadataIndex) -> Archive:
        place = self._places[index]
        name = place.relative_path
        if name not in self._files:
            self._files[name] = np.memmap(self.folder / name, np.uint8, "r")
        return Archive(self._files[name][place.offset : place.offset + place.length])

    def _items(
        self, key: str, offsets: Sequence[int], sizes: torch.Size, *, depth: int = 0
    ) -> list[ReadItem]:
        """Say where the parts of a box are (see `read_box`). Raises OSError where some are not."""
        wanted = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=sizes)
        chunks = self._chunks(key, depth).get(tuple(offsets[:depth]), [])
        entry = replace(self._entries[key], chunks=chunks)
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        if holes := _holes(sizes, items):
            raise OSError(f"{key}: {holes}")
        return items

    def _chunks(self, key: str, depth: int) -> Mapping[tuple[int, ...], list[Any]]:
        """The chunks of a tensor by place in its first axes.

        torch looks at all for each that is read: of experts there are tens of thousands.
        """
        if (key, depth) not in self._at:
            entry, at = self._entries[key], defaultdict(list)
            for chunk in entry.chunks:
                spans = [
                    range(there)[first : first + size]
                    for there, first, size in zip(
                        entry.size[:depth], chunk.offsets, chunk.sizes, strict=False
                    )
                ]
                for place in product(*spans):
                    at[place].append(chunk)
            self._at[key, depth] = at
        return self._at[key, depth]

    def _key(self, tensor: WholeTensor) -> str:
        keys = (*tensor.keys, *tensor.keys_of_layer)
        return next((key for key in keys if key in self._entries), tensor.key)

    def _place(self, tensor: WholeTensor) -> tuple[int, ...]:
        """Where it is in the first axes, which those of layers may not be among."""
        is_stacked = tensor.layer is None or self._key(tensor) in tensor.keys
        return tensor.place if is_stacked else tensor.place[1:]

    def _entry(self, tensor: WholeTensor) -> Any:
        entry = self._entries.get(self._key(tensor))
        return entry if isinstance(entry, TensorStorageMetadata) else None


def _holes(shape: torch.Size, items: Sequence[ReadItem]) -> str | None:
    """Say what a damaged index leaves out of a tensor, or has twice; None: neither."""
    if len(items) == 1 and items[0].lengths == shape:
        return None
    times = torch.zeros(shape, dtype=torch.uint8)
    for item in items:
        _place_of(item, times).add_(1)
    if missing := (times == 0).sum().item():
        return f"{missing} elements are in no file"
    return "some elements are in several files" if (times > 1).any() else None


def _place_of(item: ReadItem, whole: torch.Tensor) -> torch.Tensor:
    for axis, (start, size) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole


class _Saving(SavePlanner):
    """Plans one process's save of tensors that do not exist yet."""

    def __init__(
        self,
        tensors: Sequence[tuple[WriteItem, Callable[[], torch.Tensor]]],
        data: Mapping[str, io.BytesIO],
    ) -> None:
        self._makes = {(item.index.fqn, item.index.offset): make for item, make in tensors}
        self._data = data
        named = [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO) for name in data]
        self._items = [*(item for item, _ in tensors), *named]

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """There is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Return what there is to write."""
        return SavePlan(items=self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan and the index."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing is left to plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Make what is written next."""
        name, offset = write_item.index.fqn, write_item.index.offset
        return self._data[name] if offset is None else self._makes[name, offset]()


def _item(written: Written) -> WriteItem:
    tensor, shape = written.tensor, written.tensor.shape
    offset = torch.Size((*tensor.place, *(0 for _ in shape)))
    size = torch.Size((*(1 for _ in tensor.place), *shape))
    whole = torch.Size((*tensor.stack.values(), *shape))
    return WriteItem(
        index=MetadataIndex(tensor.key, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=size),
            properties=TensorProperties(dtype=written.dtype),
            size=whole,
        ),
    )


def _bytes_of(
    common: Mapping[str, Any], modules: Sequence[StatefulModule]
) -> dict[str, io.BytesIO]:
    """What Megatron saves beside tensors: the common part, and empty states of modules."""
    states = {
        f"{module.name}._extra_state/shard_{_dotted(place)}_{_dotted(module.stack)}": _saved(
            [_no_state(module)]
        )
        for module in modules
        for place in product(*map(range, module.stack))
    }
    return {_COMMON: _saved([dict(common)]), **states}


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _no_state(module: StatefulModule) -> torch.Tensor | None:
    """What Transformer Engine saves for it without fp8: an empty tensor for its norms."""
    return torch.empty(0, dtype=torch.uint8) if module.is_norm else None


def _saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
