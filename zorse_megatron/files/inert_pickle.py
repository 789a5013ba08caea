"""Pickles of others, read without running anything that they name.

Only plain values become what they were. Every class and function is a `StandIn`, which is made
like an object and does nothing.
"""

import pickle
from typing import Any


class StandIn:
    """Takes whatever a pickle gives to an object; attributes are those that it had."""

    arguments: tuple[Any, ...]
    """What it was made from."""

    def __new__(cls, *arguments: Any, **_kwargs: Any) -> "StandIn":
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, _item: Any) -> None:
        """Take an item of what was a list."""

    def extend(self, _items: Any) -> None:
        """Take items of what was a list."""

    def add(self, _item: Any) -> None:
        """Take an item of what was a set."""

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass


class InertUnpickler(pickle.Unpickler):
    """Runs nothing. Raises whatever a file that is no pickle makes pickle raise."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for every name."""
        del module, name
        return StandIn

    def persistent_load(self, pid: Any) -> Any:
        """Return the name itself of what is elsewhere: torch's bytes of a tensor."""
        return pid
