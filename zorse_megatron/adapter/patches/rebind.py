"""Rebinding a name at its use site: one record each, checked, undoable, never silent.

Only a record of the `REGISTRY` (`records.yaml`) can be applied, once at a time. Before anything is
changed, it is compared with what is installed: the version, that the name exists, its signature.
What does not fit stops the job with a `SeamError` that lists all of it. Megatron is imported when a
record is applied.
"""

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import TypeAdapter

from zorse_megatron.errors import Problem, SeamError
from zorse_megatron.files.yaml_text import read_table

# The versions that we know, checked before Megatron is imported.


MEGATRON_VERSIONS = ">=0.19,<0.20"

_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?(\w*)['\"]?", re.MULTILINE)


def megatron_directory() -> Path | None:
    """Where `import megatron.core` would come from, found without importing it."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def installed_megatron() -> str | None:
    """Version of the megatron-core that an import would find, None without one.

    Read from its `package_info.py`: a checkout of Megatron-LM on the path has no distribution, and
    may hide one of another version.
    """
    directory = megatron_directory()
    info = None if directory is None else directory / "core" / "package_info.py"
    if info is None or not info.is_file():
        return None
    number = dict(_NUMBER.findall(info.read_text()))
    return f"{number['MAJOR']}.{number['MINOR']}.{number['PATCH']}{number['PRE_RELEASE']}"


def check_megatron(version: str | None) -> None:
    """Raise SeamError unless `version` is one that our hooks were written for."""
    # Release candidates of a known version have the same seams.
    if version is not None and SpecifierSet(MEGATRON_VERSIONS).contains(
        Version(version), prereleases=True
    ):
        return
    found = "no megatron-core" if version is None else f"megatron-core {version}"
    raise SeamError.of(
        "This Megatron cannot run a plan",
        where="the Python environment",
        found=found,
        expected=f"megatron-core {MEGATRON_VERSIONS}",
        remedy='Run: pip install "megatron-core[training]>=0.19,<0.20"',
    )


_ABSENT = object()
_UNLISTED = (
    "a name without a record",
    "one of zorse_megatron/adapter/patches/records.yaml",
    "List it there, with what it is for and the test that needs it.",
)
_TWICE = (
    "a record that is applied already",
    "each to be applied once",
    "Undo the first one before, or apply it in one place only.",
)


@dataclass(frozen=True, kw_only=True)
class Rebinding:
    """One name that is bound to something of ours; `records.yaml` says what the fields are."""

    target: str
    parameters: tuple[str, ...]
    becomes: str
    why: str
    test: str
    delete_when: str


Make = Callable[[Any], Any]
"""Gets what a name is bound to, a function or a class, and returns what is to take its place.

Of a method, static or of a class, it gets and returns the plain function (with `self` or `cls`).
"""
Replacements = Mapping[str, Make]
"""By the records' names."""


class Registry:
    """All records that there are, by name; none but these can be applied."""

    def __init__(
        self,
        records: Mapping[str, Rebinding],
        *,
        installed: Callable[[], str | None] = installed_megatron,
    ) -> None:
        """`installed`: the version of Megatron; None: it is not there."""
        self.records = dict(records)
        self.installed = installed
        self._in_place: set[str] = set()

    def apply(self, replacements: Replacements) -> Callable[[], None]:
        """Apply all, in their order, or none. Returns the undo; undo what came last first.

        Raises SeamError with everything that does not fit.
        """
        self._refuse_misuse(replacements)
        check_megatron(self.installed())
        if problems := [problem for name in replacements for problem in self.problems(name)]:
            raise SeamError("Megatron has changed where zorse-megatron hooks into it", problems)
        undo: list[tuple[Any, str, Any]] = []

        def restore() -> None:
            while undo:
                owner, name, original = undo.pop()
                if original is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
            self._in_place.difference_update(replacements)

        self._in_place.update(replacements)
        try:
            for key, make in replacements.items():
                owner, name = _locate(self.records[key].target)
                raw = _current(owner, name)
                replacement = _like(raw, make(_function(raw)))
                # A name that a class inherits is put back by taking ours away.
                undo.append((owner, name, vars(owner).get(name, _ABSENT)))
                setattr(owner, name, replacement)
        except BaseException:
            restore()
            raise
        return restore

    @contextmanager
    def applied(self, replacements: Replacements) -> Iterator[None]:
        """Apply all records for the duration of a `with` block."""
        restore = self.apply(replacements)
        try:
            yield
        finally:
            restore()

    def problems(self, name: str) -> list[Problem]:
        """Compare one record with what is installed."""
        record = self.records[name]
        try:
            raw = _current(*_locate(record.target))
        except (ImportError, AttributeError) as error:
            return [_problem(record, f"no such name ({error})", "the name to exist")]
        found_parameters = tuple(inspect.signature(_function(raw)).parameters)
        if found_parameters == record.parameters:
            return []
        expected = f"parameters {record.parameters}"
        return [_problem(record, f"parameters {found_parameters}", expected)]

    def _refuse_misuse(self, replacements: Replacements) -> None:
        """Raise SeamError where our own code applies what it must not."""
        unlisted = [name for name in replacements if name not in self.records]
        twice = [name for name in replacements if name in self._in_place]
        problems = [
            Problem(where=name, found=found, expected=expected, remedy=remedy)
            for names, found, expected, remedy in ((unlisted, *_UNLISTED), (twice, *_TWICE))
            for name in names
        ]
        if problems:
            raise SeamError("Names are rebound in a way that is not allowed", problems)


def _locate(target: str) -> tuple[Any, str]:
    """Return the owner object and the last attribute name of `target`."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _current(owner: Any, name: str) -> Any:
    """What the name is bound to; static methods and those of a class as they are defined."""
    return inspect.getattr_static(owner, name) if inspect.isclass(owner) else getattr(owner, name)


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _like(raw: Any, replacement: Any) -> Any:
    """Static, or of the class, as what it takes the place of."""
    return type(raw)(replacement) if isinstance(raw, staticmethod | classmethod) else replacement


def _problem(record: Rebinding, found: str, expected: str) -> Problem:
    known = f"This Megatron differs from the versions we know ({MEGATRON_VERSIONS})"
    return Problem(
        where=record.target,
        found=found,
        expected=expected,
        remedy=f"{known}; install one of those. The hook is needed because: {record.why}",
    )


_RECORDS = TypeAdapter(dict[str, Rebinding])

REGISTRY = Registry(_RECORDS.validate_python(read_table(__package__, "records.yaml")))
