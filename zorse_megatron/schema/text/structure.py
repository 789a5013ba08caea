"""Shape errors of a file (names, types, single values), from pydantic's words into Problems."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from zorse_megatron.errors import Problem
from zorse_megatron.schema.text.file_kind import FileKind

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
