"""Every flag of megatron-core 0.19's parser: its spellings, values and default.

scripts/write_megatron_flags.py generates megatron_flags.json from the parser, so that
commands which plan can read a training command without torch and Megatron.
"""

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter

from zorse_megatron.files.yaml_text import read_table

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


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of `flags.yaml`, which says what the keys mean."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    flags: str = ""
    under_plan: Literal["compared", "predicted", "accepted", "decided", "refused"] | None = None
    """None: a further reason."""
    what: str = ""
    """What the flags are, for people."""
    beside: dict[str, str | bool] = field(default_factory=dict)
    when: str = ""
    again: bool = False
    of_stock: bool = False
    values: tuple[str, ...] | None = None
    """None: any."""
    accepted: tuple[str | int | float | bool, ...] = ()
    where: str = "{flag}"
    found: str = "{given}"
    expected: str = "{accepted} under a plan ({what})"
    remedy: str = ""

    @property
    def refuses(self) -> bool:
        """Whether its flags are refused whatever else holds."""
        return self.under_plan in ("decided", "refused")


@dataclass(frozen=True, kw_only=True)
class MachineRow:
    """One of the rows `machines`, on a machine that lacks something."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    flag: str
    without: str
    """"GPU", or a module of Python."""
    why: str
    added: str | bool = False
    accepted: tuple[str, ...] = ()
    of_local_layers: bool = False

    @property
    def value(self) -> str | None:
        """What is added with the flag; None for a switch."""
        return self.added if isinstance(self.added, str) else None

    @property
    def words(self) -> list[str]:
        """As in a command."""
        return [self.flag] if self.value is None else [self.flag, self.value]

    @property
    def fine(self) -> tuple[str, ...]:
        """Values that the flag may have."""
        return self.accepted if self.value is None else (self.value,)


_IN_NO_ROW = Row(
    what="Not looked at yet",
    under_plan="refused",
    remedy="Untested under a plan; remove the flag, or train without --zorse-plan.",
)


@cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = read_table(__package__, "flags.yaml")
    return found


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in the file's order."""
    return TypeAdapter(tuple[Row, ...]).validate_json(json.dumps(_file()["rows"]))


@cache
def machine_rows() -> tuple[MachineRow, ...]:
    """What machines need, in the file's order."""
    listed = json.dumps(_file()["machines"])
    return TypeAdapter(tuple[MachineRow, ...]).validate_json(listed)


def names_of(row: Row) -> Iterator[str]:
    """Arguments of a row."""
    return (name for entry in row.flags.split() for name in expanded(entry))


def expanded(entry: str) -> list[str]:
    """Arguments that an entry of a row stands for; of a star in the parser's order."""
    return matching(defaults(), entry) if "*" in entry else [entry]


@cache
def further_rows() -> tuple[Row, ...]:
    """Those that refuse a flag when something else holds."""
    return tuple(row for row in rows() if row.under_plan is None)


@cache
def row_of() -> Mapping[str, Row]:
    """Argument -> the row that says what becomes of it."""
    said = {name: row for row in rows() if row.under_plan for name in names_of(row)}
    return {name: said.get(name, _IN_NO_ROW) for name in defaults()}


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


def as_json(value: Any) -> Any:
    """A default or a parsed value; of an enumeration its name."""
    if isinstance(value, enum.Enum):
        return value.name
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


def _flag(row: dict[str, Any]) -> Flag:
    choices = row["choices"]
    return Flag(
        **{
            **row,
            "spellings": tuple(row["spellings"]),
            "choices": None if choices is None else tuple(choices),
        }
    )


# Defaults of Megatron that our own runs of small models turn off, each with its reason.
#
# The rule is to run as a user's job does: with evaluations, two data loader workers for each data
# set, and the handler of signals that `zorse launch` adds. tests/megatron/test_launched_jobs.py
# does, and tests/slurm. Costs are of stock, with 4 layers of width 64 and 6 iterations, on two
# cores.


WITHOUT_EVALUATION = ("--eval-interval", "1000", "--eval-iters", "0")
"""A job of 0.7 s would take 7 s with the 100 iterations that it evaluates by default at its end,
and a corpus of `--split 100,0,0` has no samples for them. Megatron has no default interval.
"""
WITHOUT_WORKERS = ("--num-workers", "0")
"""Two to six more processes for each rank: a job of 0.7 s takes 1.2 s."""
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
"""Layouts draw other random numbers, and losses are compared to rounding."""
