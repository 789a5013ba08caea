"""Plan files: strict loading, canonical saving, fingerprints, and their JSON schema."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from zorse_megatron.errors import PlanError
from zorse_megatron.files.json_text import layout, read_json
from zorse_megatron.files.read_write import write_text
from zorse_megatron.files.strict import FileKind, built, check_version, plain, read_file
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.rules import problems_of

SCHEMA_VERSION = 2
_REMOVED = {
    "rank_settings": "It was removed: say recompute and offload in the replica, for all of its "
    "ranks, or in the group.",
    **dict.fromkeys(
        ("hop", "extra_in_flight", "delayed_samples"),
        "It was removed, as orders follow compute_s and transfer now: plan again with zorse plan.",
    ),
}
PLAN_FILE = FileKind(
    name="plan",
    syntax="JSON",
    document="docs/plan-file.md",
    error=PlanError,
    root=Plan,
    removed=_REMOVED,
)
_FINGERPRINT_CHARACTERS = 16


def load_plan(path: str | Path) -> Plan:
    """Read, check and return the plan in a file.

    Raises PlanError with every problem of the file. Nothing is converted or guessed.
    """
    return parse_plan(read_file(path, PLAN_FILE), source=str(path))


def parse_plan(data: bytes, *, source: str = "plan") -> Plan:
    """Check and return the plan in `data`; Problems call it `source`. Raises PlanError."""
    value, problems = read_json(data, source, PLAN_FILE)
    check_version(value, source, PLAN_FILE, SCHEMA_VERSION)
    plan: Plan = built(value, problems, PLAN_FILE, source, rules=problems_of)
    return plan


def dump_plan(plan: Plan) -> str:
    """Return the canonical text of a plan: fields in a fixed order, none that is None."""
    return layout(plain(plan)) + "\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file: all of it or nothing, even if the machine stops half way.

    Raises PlanError for a plan that `load_plan` would not take back, NotWritten for a path that
    takes no file.
    """
    problems = problems_of(plan)
    if problems:
        raise PlanError(f"the plan for {path} cannot be used", problems)
    write_text(path, dump_plan(plan))


def fingerprint(plan: Plan) -> str:
    """Return 16 hex digits that are equal for equal plans; predictions do not count."""
    text = dump_plan(dataclasses.replace(plan, predictions=None))
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_CHARACTERS]


# The JSON schema of the plan file, for editors and for programs in other languages.
#
# It says what the classes in `plan.py` say: names, types, single values. The rules that tie values
# together are not in it; `zorse check` has those.


def json_schema() -> dict[str, Any]:
    """Return the schema, JSON Schema draft 2020-12."""
    schema = TypeAdapter(Plan).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def json_schema_text() -> str:
    """Return the text of `plan.schema.json`."""
    return layout(json_schema()) + "\n"
