"""From the bytes of a file to plain values to its classes, strictly.

Plan, cluster, model and profile files all come through here, so that each reports all of its
problems at once and says where they are in the same way.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zorse_megatron.errors import Problem
from zorse_megatron.files.read import MAX_INPUT_BYTES, NotInputError, read_input
from zorse_megatron.schema.text.control_characters import control_problems
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.structure import path_of, problems_from, without_unknown_keys

# More than anybody reads; a generated file may have the same one a million times.
_MAX_PROBLEMS = 100

Rules = Callable[[Any], Iterable[Problem]]
Lines = Mapping[str, int]


def read_file(path: str | Path, kind: FileKind, *, article: str | None = None) -> bytes:
    """Return the bytes of a file. Raises the kind's error where there is none to read.

    `article`: what is expected, where the kind is not known before: "a plan or model".
    """
    try:
        return read_input(path)
    except OSError as error:
        said = error.strerror or str(error)
        problem = Problem(
            where=str(path),
            found=said if isinstance(error, NotInputError) else f"no readable file ({said})",
            expected=f"{article or kind.with_article} file: a regular one of at most "
            f"{MAX_INPUT_BYTES / 2**20:.0f} MiB",
            remedy="Check the path, and who may read it.",
        )
        raise kind.error(f"cannot read {path}", [problem]) from error


def built(
    value: Any,
    problems: Iterable[Problem],
    kind: FileKind,
    source: str,
    *,
    rules: Rules,
    lines: Lines | None = None,
) -> Any:
    """Return `value` as an object of the kind's root class.

    `problems` are those already known, located. Raises the kind's error with them, with every
    error of shape, and with every breach of the `rules` where the shape lets them run. `lines`
    gives the line of each path, for a format that people write.
    """
    found = list(problems)
    controls = islice(control_problems(value), _MAX_PROBLEMS + 1)
    found += [_at(problem, source, lines, problem.where) for problem in controls]
    result = None
    try:
        result = _adapter(kind.root).validate_json(json.dumps(value))
    except ValidationError as error:
        for location, problem in islice(problems_from(error, kind), _MAX_PROBLEMS + 1):
            found.append(_at(problem, source, lines, path_of(location)))
        # With the unknown keys gone the rules may have more to say.
        if without_unknown_keys(value, error):
            result = _adapter(kind.root).validate_json(json.dumps(value))
    if result is not None:
        broken = islice(rules(result), _MAX_PROBLEMS + 1)
        found += [_at(problem, source, lines, problem.where) for problem in broken]
    if result is None or found:
        first = ", and has more problems than these" if len(found) > _MAX_PROBLEMS else ""
        raise kind.error(f"{source} cannot be used{first}", found[:_MAX_PROBLEMS])
    return result


def check_version(value: Any, source: str, kind: FileKind, version: int) -> None:
    """Stop at a file of another version: its other keys would only be misread."""
    found = value.get("schema_version") if isinstance(value, dict) else None
    if type(found) is not int or found == version:
        return  # A missing version or one of the wrong type is a problem like any other.
    newer = found > version
    problem = Problem(
        where=f"{source}: schema_version",
        found=f"{found}, " + ("written by a newer version" if newer else "which never existed"),
        expected=str(version),
        remedy="Update zorse-megatron here." if newer else f"Write the {kind.name} again.",
    )
    raise kind.error(f"{source} cannot be used", [problem])


def plain(value: Any) -> Any:
    """Turn an object into JSON values; fields that are None are left out."""
    if dataclasses.is_dataclass(value):
        pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {name: plain(item) for name, item in pairs if item is not None}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    # -0.0 equals 0.0, so it must not get a text of its own.
    return value + 0.0 if isinstance(value, float) else value


@cache
def _adapter(root: Any) -> TypeAdapter[Any]:
    return TypeAdapter(root)


def _at(problem: Problem, source: str, lines: Lines | None, path: str) -> Problem:
    """Put the file in front, and the line of the nearest thing on the path that has one."""
    line = None
    while lines is not None and line is None and path:
        line = lines.get(path)
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    position = f"{source}: line {line}: " if line else f"{source}: "
    return dataclasses.replace(problem, where=position + problem.where)
