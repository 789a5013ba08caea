"""How large the files of a torch_dist checkpoint must be at least, as its `.metadata` says.

The file is a pickle of torch's classes. It is read here without torch, and without running anything
that it names: whatever class it asks for becomes an empty stand-in.
"""

import pickle
from pathlib import Path
from typing import Any

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


class _StandIn:
    """Takes whatever a pickle gives to an object."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "_StandIn":
        return super().__new__(cls)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, _item: Any) -> None:
        """Take an item of what was a list."""

    def extend(self, _items: Any) -> None:
        """Take items of what was a list."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        del module, name
        return _StandIn


def least_bytes(folder: Path) -> dict[str, int]:
    """Map each file with tensors or objects to the end of the last one in it, in bytes.

    Raises MetadataError where `.metadata` cannot be read as torch's, OSError.
    """
    with (folder / METADATA).open("rb") as file:
        try:
            entries = _Unpickler(file).load().storage_data.values()
            found: dict[str, int] = {}
            for entry in entries:
                end = int(entry.offset) + int(entry.length)
                name = str(entry.relative_path)
                found[name] = max(found.get(name, 0), end)
        except _READ_ERRORS as error:
            raise MetadataError(f"{type(error).__name__}: {error}") from error
    if not found:
        raise MetadataError("it lists no tensors")
    return found
