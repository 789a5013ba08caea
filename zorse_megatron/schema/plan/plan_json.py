"""Plan files: strict loading, canonical saving, fingerprints."""

import dataclasses
import hashlib
from pathlib import Path

from zorse_megatron.errors import PlanError
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_rules import problems_of
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.json_text import layout, read_json
from zorse_megatron.schema.text.strict import built, check_version, plain, read_file

SCHEMA_VERSION = 1
_REMOVED = {
    "rank_settings": "It was removed: say recompute and offload in the replica, for all of its "
    "ranks, or in the group.",
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
