"""From the bytes of a file to its classes, strictly: all that is wrong with its shape, at once.

Plan, cluster, model and profile files all come through here, so that each reports all of its
problems at once and says where they are in the same way.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.read_write import MAX_INPUT_BYTES, NotInputError, read_input
from zorse_megatron.files.wording import control_problems

# What the strict readers need to know of a kind of file: its class, its name, its document.


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file that people or programs hand to us."""

    name: str
    """In messages: "plan"."""
    syntax: str
    """JSON or YAML."""
    document: str
    """Where its fields are described."""
    error: type[ZorseError]
    """What is raised for a file that cannot be used."""
    root: Any
    """The class of its top level."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Key that files may still have -> what to do now."""
    has_long_texts: bool = False
    """Whether texts may have several lines, as messages have."""

    @property
    def with_article(self) -> str:
        """As a message says it: "a plan"."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def see(self) -> str:
        """A remedy of last resort."""
        return f"{self.document} describes every field."


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
    controls = islice(control_problems(value, lines=kind.has_long_texts), _MAX_PROBLEMS + 1)
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
    if found > version:
        said, remedy = "written by a newer version", "Update zorse-megatron here."
    else:
        said = "written by an earlier version" if found > 0 else "which never existed"
        remedy = f"Write the {kind.name} again. {kind.see}"
    problem = Problem(
        where=f"{source}: schema_version",
        found=f"{found}, {said}",
        expected=str(version),
        remedy=remedy,
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


# Shape errors of a file (names, types, single values), from pydantic's words into Problems.


UNKNOWN_KEY = "unexpected_keyword_argument"
_MAX_VALUE_CHARACTERS = 60
# Below the default of 0.6, so that "shard" suggests "shard_weight".
_LIKENESS = 0.5

Location = tuple[int | str, ...]

# What each of pydantic's error types asks for, with the values of its context.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "finite_number": "a finite number",
    "literal_error": "{expected}",
    "greater_than": "a number greater than {gt}",
    "less_than": "a number less than {lt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "string_too_short": "a string that is not empty",
    "too_short": "at least {min_length} entry",
    "too_long": "exactly {max_length} entries",
}


def problems_from(error: ValidationError, kind: FileKind) -> list[tuple[Location, Problem]]:
    """Translate every error, with its location; `where` spells it, as in `groups[1].ranks`."""
    problems: list[tuple[Location, Problem]] = []
    for details in error.errors(include_url=False):
        if not _is_echo(details):
            problems.append((details["loc"], _problem(details, kind)))
    return problems


def without_unknown_keys(value: Any, error: ValidationError) -> bool:
    """Delete the unknown keys from `value` if `error` is about nothing else; say whether."""
    errors = error.errors(include_url=False)
    if any(details["type"] != UNKNOWN_KEY for details in errors):
        return False
    for details in errors:
        *parents, key = details["loc"]
        owner = value
        for parent in parents:
            owner = owner[parent]
        del owner[key]
    return True


def path_of(location: Iterable[int | str]) -> str:
    """Spell a location: `groups[1].replicas[0]`; `top level` for the file itself."""
    path = ""
    for item in location:
        path += f"[{item}]" if isinstance(item, int) else f".{item}"
    return path.removeprefix(".") or "top level"


def _is_echo(details: ErrorDetails) -> bool:
    """Whether a list is called too short only because its entries have errors of their own."""
    return details["type"] == "too_short" and len(details["input"]) > 0


def _problem(details: ErrorDetails, kind: FileKind) -> Problem:
    location = details["loc"]
    if details["type"] == UNKNOWN_KEY:
        return _unknown_key(location, kind)
    if details["type"] == "missing":
        return _missing(location, details["input"], kind)
    found, template = details["input"], _EXPECTED.get(details["type"])
    return Problem(
        where=path_of(location),
        found=_shown(found),
        expected=template.format(**details.get("ctx", {})) if template else details["msg"],
        remedy=_remedy(found, details, kind),
    )


def _unknown_key(location: Location, kind: FileKind) -> Problem:
    key, known = str(location[-1]), _known_keys(location[:-1], kind)
    close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_LIKENESS)
    remedy = f'Did you mean "{close[0]}"?' if close else f"Remove it. {kind.see}"
    return Problem(
        where=path_of(location[:-1]),
        found=f'unknown key "{key}"',
        expected=f"only the keys {', '.join(known)}",
        remedy=kind.removed.get(key, remedy),
    )


def _missing(location: Location, found: Any, kind: FileKind) -> Problem:
    if isinstance(location[-1], int):  # A list of fixed length, such as [first, stop].
        return Problem(
            where=path_of(location[:-1]),
            found=_shown(found),
            expected="a list of 2 integers",
            remedy=kind.see,
        )
    return Problem(
        where=path_of(location[:-1]),
        found=f'no key "{location[-1]}"',
        expected="every required key",
        remedy=f'Add "{location[-1]}". {kind.see}',
    )


def _remedy(found: Any, details: ErrorDetails, kind: FileKind) -> str:
    error_type = details["type"]
    if isinstance(found, str) and error_type in ("int_type", "float_type", "bool_type"):
        return "Write it without quotes."
    if error_type == "int_type" and isinstance(found, float):
        return "Write it without a decimal point or exponent."
    if error_type == "literal_error" and isinstance(found, str):
        choices = details["ctx"]["expected"].replace(" or ", ", ").split(", ")
        close = difflib.get_close_matches(f"'{found}'", choices, n=1, cutoff=_LIKENESS)
        return f"Did you mean {close[0]}?" if close else kind.see
    return kind.see


def _shown(value: Any) -> str:
    """Show a value as JSON, shortened, with its JSON type where a reader may mistake it."""
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _MAX_VALUE_CHARACTERS:
        text = text[: _MAX_VALUE_CHARACTERS - 3] + "..."
    kinds = {str: "a string", list: "a list", dict: "an object", bool: "a boolean"}
    kind = kinds.get(type(value))
    return f"{text} ({kind})" if kind else text


def _known_keys(location: Location, kind: FileKind) -> list[str]:
    """Return the keys of the object at `location`, in the order of its class."""
    owner: Any = kind.root
    for item in location:
        if isinstance(item, str):
            owner = _class_in(get_type_hints(owner)[item])
    return [field.name for field in dataclasses.fields(owner)]


def _class_in(hint: Any) -> Any:
    """Return the class inside a hint such as `tuple[Group, ...]` or `Offload | None`."""
    if dataclasses.is_dataclass(hint):
        return hint
    parts: Sequence[Any] = get_args(hint)
    return next((found for part in parts if (found := _class_in(part)) is not None), None)
