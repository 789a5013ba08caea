"""Plan files: strict loading, canonical saving, fingerprints."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.schema.json_text import layout, read_json
from zorse_megatron.schema.plan import Plan
from zorse_megatron.schema.structure import problems_from, without_unknown_keys
from zorse_megatron.schema.validate import problems_of

SCHEMA_VERSION = 1
_FINGERPRINT_CHARACTERS = 16
_adapter = TypeAdapter(Plan)


def load_plan(path: str | Path) -> Plan:
    """Read, check and return the plan in a file.

    Raises PlanError with every problem of the file. Nothing is converted or guessed.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        problem = Problem(
            where=str(path),
            found=f"no readable file ({error.strerror or error})",
            expected="a plan file",
            remedy="Check the path, and that every rank can read it.",
        )
        raise PlanError(f"cannot read {path}", [problem]) from error
    return parse_plan(data, source=str(path))


def parse_plan(data: bytes, *, source: str = "plan") -> Plan:
    """Check and return the plan in `data`; Problems call it `source`. Raises PlanError."""
    value, problems = read_json(data, source)
    _check_version(value, source)
    plan = None
    try:
        plan = _adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        problems += _located(problems_from(error), source)
        # With the unknown keys gone the rules of validate.py may have more to say.
        if without_unknown_keys(value, error):
            plan = _adapter.validate_json(json.dumps(value))
    if plan is not None:
        problems += _located(problems_of(plan), source)
    if plan is None or problems:
        raise PlanError(f"{source} cannot be used", problems)
    return plan


def dump_plan(plan: Plan) -> str:
    """Return the canonical text of a plan: fields in a fixed order, none that is None."""
    return layout(_plain(plan)) + "\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file: all of it or nothing, even if the machine stops half way.

    Raises PlanError for a plan that `load_plan` would not take back.
    """
    problems = problems_of(plan)
    if problems:
        raise PlanError(f"the plan for {path} cannot be used", problems)
    path = Path(path)
    # In the same directory, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(dump_plan(plan))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def fingerprint(plan: Plan) -> str:
    """Return 16 hex digits that are equal for equal plans; predictions do not count."""
    text = dump_plan(dataclasses.replace(plan, predictions=None))
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_CHARACTERS]


def _check_version(value: Any, source: str) -> None:
    """Stop at a file of another version: its other keys would only be misread."""
    version = value.get("schema_version") if isinstance(value, dict) else None
    if type(version) is not int or version == SCHEMA_VERSION:
        return  # A missing version or one of the wrong type is a problem like any other.
    newer = version > SCHEMA_VERSION
    problem = Problem(
        where=f"{source}: schema_version",
        found=f"{version}, " + ("written by a newer version" if newer else "which never existed"),
        expected=str(SCHEMA_VERSION),
        remedy="Update zorse-megatron here." if newer else "Write the plan again.",
    )
    raise PlanError(f"{source} cannot be used", [problem])


def _located(problems: list[Problem] | tuple[Problem, ...], source: str) -> list[Problem]:
    return [
        dataclasses.replace(problem, where=f"{source}: {problem.where}") for problem in problems
    ]


def _plain(value: Any) -> Any:
    """Turn a plan into JSON values; fields that are None are left out."""
    if dataclasses.is_dataclass(value):
        pairs = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {name: _plain(item) for name, item in pairs if item is not None}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    # -0.0 equals 0.0, so it must not get a text of its own.
    return value + 0.0 if isinstance(value, float) else value
