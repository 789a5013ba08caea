"""Every flag of megatron-core 0.19's parser: its spellings, values and default.

Generated from the parser by scripts/write_megatron_flags.py, so that commands which plan can read
a training command without torch and Megatron.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE_FILE = Path(__file__).with_name("megatron_flags.json")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag, as argparse knows it."""

    spellings: tuple[str, ...]
    """With its dashes; the first one is the usual one."""
    name: str
    """Name of the parsed argument."""
    kind: Literal["store", "true", "false", "boolean"]
    """boolean: `--x` and `--no-x`."""
    nargs: int | Literal["+", "*"] | None
    """Number of values; None: one, and not in a list."""
    type: Literal["int", "float", "str", "name", "opaque"] | None
    """What values are read as. name: of a member of an enumeration; opaque: by Megatron alone."""
    choices: tuple[Any, ...] | None
    """Values that are accepted; None: all."""
    default: Any
    """Value of the parsed argument without the flag."""


@cache
def flags() -> tuple[Flag, ...]:
    """All flags, in the parser's order."""
    return tuple(_flag(row) for row in json.loads(TABLE_FILE.read_text(encoding="utf-8")))


@cache
def by_spelling() -> Mapping[str, Flag]:
    """Spelling -> flag."""
    return {spelling: flag for flag in flags() for spelling in flag.spellings}


@cache
def spelling_of(name: str) -> str:
    """The usual spelling of the flag that sets an argument; dashes for underscores if none does."""
    found = (flag.spellings[0] for flag in flags() if flag.name == name)
    return next(found, "--" + name.replace("_", "-"))


@cache
def defaults() -> Mapping[str, Any]:
    """Argument -> its value where no flag sets it. Of flags that share one the first one counts."""
    found: dict[str, Any] = {}
    for flag in flags():
        found.setdefault(flag.name, flag.default)
    return found


def _flag(row: dict[str, Any]) -> Flag:
    choices = row["choices"]
    return Flag(
        **{
            **row,
            "spellings": tuple(row["spellings"]),
            "choices": None if choices is None else tuple(choices),
        }
    )
