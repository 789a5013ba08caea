"""Rebinding a name at its use site: one record each, checked, undoable, never silent.

A record says which name is rebound, to what, why, for which Megatron versions, which test would
fail without it, and when it can be deleted. Applying a record checks that the target exists and
has the signature that we know; anything else stops the job with a `SeamError`.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from zorse_megatron.errors import Problem, SeamError


@dataclass(frozen=True, kw_only=True)
class Rebinding:
    """One name in Megatron that we bind to something of ours.

    `target` is `package.module:attribute` (attribute may be dotted: `Class.method`). `make` gets
    the current binding and returns the new one. `parameters` are the parameter names that the
    target must have, in order (None when the target is no function). `versions` is a PEP 440
    specifier for megatron-core, checked once for all records by `adapter.versions`.
    """

    target: str
    make: Callable[[Any], Any]
    why: str
    versions: str
    test: str
    delete_when: str
    parameters: tuple[str, ...] | None = None


def _locate(target: str) -> tuple[Any, str]:
    """Return the owner object and the last attribute name of `target`."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _problem(record: Rebinding, found: str, expected: str) -> Problem:
    return Problem(
        where=record.target,
        found=found,
        expected=expected,
        remedy=f"This Megatron differs from the versions we know ({record.versions}); install one "
        f"of those. The hook is needed because: {record.why}",
    )


def check(record: Rebinding) -> Problem | None:
    """Compare one record with the Megatron that is installed."""
    try:
        owner, name = _locate(record.target)
        current = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        return _problem(record, f"no such name ({error})", "the name to exist")
    if record.parameters is None:
        return None
    found = tuple(inspect.signature(current).parameters)
    if found != record.parameters:
        return _problem(record, f"parameters {found}", f"parameters {record.parameters}")
    return None


def apply(records: Sequence[Rebinding]) -> Callable[[], None]:
    """Apply all records, or none: raises SeamError with every mismatch. Returns the undo."""
    problems = [problem for record in records if (problem := check(record)) is not None]
    if problems:
        raise SeamError("Megatron has changed where zorse-megatron hooks into it", problems)
    undo: list[tuple[Any, str, Any]] = []
    for record in records:
        owner, name = _locate(record.target)
        # A class attribute is read raw so that a staticmethod or classmethod is put back whole.
        original = vars(owner)[name] if inspect.isclass(owner) else getattr(owner, name)
        undo.append((owner, name, original))
        setattr(owner, name, record.make(getattr(owner, name)))

    def restore() -> None:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)

    return restore


@contextmanager
def applied(records: Sequence[Rebinding]) -> Iterator[None]:
    """Apply all records for the duration of a `with` block."""
    restore = apply(records)
    try:
        yield
    finally:
        restore()
