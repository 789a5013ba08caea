"""What `torch.save` has written, without running anything of it, and in part.

An archive is a zip file with a pickle and, not compressed, the bytes of each tensor. Sources:
`_save` in `torch.serialization`, `_rebuild_tensor_v2` in `torch._utils`.
"""

import io
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch

from zorse_megatron.files.inert_pickle import InertUnpickler

_LOCAL_HEADER = struct.Struct("<26xHH")


class Archive:
    """A part of a file that is an archive. Of it, only what is looked at is read.

    Methods raise OSError, and whatever a part that is none makes pickle, numpy and zipfile raise.
    """

    def __init__(self, path: Path, offset: int, num_bytes: int) -> None:
        self._data = np.memmap(path, np.uint8, "r", offset, (num_bytes,))
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
