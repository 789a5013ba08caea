"""CSV tables of measurements: strict reading, every bad row reported with its line."""

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zorse_megatron.errors import Problem, ProfileError

# A message lists at most this many bad rows of a table.
_MAX_PROBLEMS = 20

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """How the text of a cell is read."""

    read: Callable[[str], Any]
    expected: str


def _text(cell: str) -> str:
    if not cell:
        raise ValueError
    return cell


def _positive_integer(cell: str) -> int:
    value = int(cell) if len(cell) <= 18 else 0
    if value < 1:
        raise ValueError
    return value


def _count(cell: str) -> int:
    value = float(cell)  # public tables write counts as 8650752.0
    if not (0 <= value <= 1e18 and value == int(value)):
        raise ValueError
    return int(value)


def _milliseconds(cell: str) -> float:
    """Return seconds."""
    value = float(cell) / 1e3
    if not 0 <= value <= 86400:
        raise ValueError
    return value


def _number(cell: str) -> float:
    value = float(cell)
    if not math.isfinite(value):
        raise ValueError
    return value


TEXT = Column(read=_text, expected="a name")
POSITIVE = Column(read=_positive_integer, expected="a positive integer")
COUNT = Column(read=_count, expected="a whole number, 0 or more")
MILLISECONDS = Column(read=_milliseconds, expected="milliseconds, 0 or more, a day at most")
NUMBER = Column(read=_number, expected="a finite number")


def header_of(text: str) -> tuple[str, ...]:
    """Return the names of the columns."""
    return tuple(name.strip() for name in next(csv.reader(io.StringIO(text)), []))


def read_table(text: str, columns: Mapping[str, Column], source: str) -> list[Row]:
    """Return the rows of a table that has these columns. Raises ProfileError with every problem."""
    problems: list[Problem] = []
    rows = []
    reader = csv.reader(io.StringIO(text))
    names = [name.strip() for name in next(reader, [])]
    for cells in reader:
        if not cells:
            continue
        where = f"{source}: line {reader.line_num}"
        if len(cells) != len(names):
            problems.append(_problem(where, f"{len(cells)} cells", f"{len(names)}, as the header"))
            continue
        found = list(_bad_cells(dict(zip(names, cells, strict=True)), columns, where))
        problems += found
        if not found:
            pairs = zip(names, cells, strict=True)
            rows.append({n: columns[n].read(c.strip()) for n, c in pairs if n in columns})
    if not rows and not problems:
        problems.append(_problem(source, "a header without rows", "measurements"))
    if problems:
        more = len(problems) - _MAX_PROBLEMS
        shown = problems[:_MAX_PROBLEMS]
        if more > 0:
            shown.append(_problem(source, f"{more} more problems of this kind", "none"))
        raise ProfileError(f"{source} cannot be imported", shown)
    return rows


def _bad_cells(
    row: Mapping[str, str], columns: Mapping[str, Column], where: str
) -> Iterator[Problem]:
    for name, column in columns.items():
        cell = row[name].strip()
        try:
            column.read(cell)
        except (ValueError, OverflowError):
            yield _problem(f"{where}: {name}", f'"{cell[:60]}"', column.expected)


def _problem(where: str, found: str, expected: str) -> Problem:
    remedy = "docs/profile-file.md describes the tables that can be imported."
    return Problem(where=where, found=found, expected=expected, remedy=remedy)
