"""JSON as text: reading it strictly, and laying it out for people.

Reading reports what Python's parser would pass over: keys given twice, and whether a file that
does not parse was cut off. Layout keeps short things on one line, so that a replica is a line.
"""

import json
from collections import Counter
from typing import Any

from pydantic_core import from_json

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.strict import FileKind

# Of a line without its key, which comes on top.
_LINE_WIDTH = 100


class JsonObject(dict[str, Any]):
    """A JSON object that remembers which of its keys came more than once."""

    repeated: tuple[str, ...] = ()


def read_json(data: bytes, source: str, kind: FileKind) -> tuple[Any, list[Problem]]:
    """Parse UTF-8 JSON; return the value, and a Problem for each key that an object repeats.

    Raises the kind's error when there is no value to return. Lists of Problems name `source`.
    """
    text = read_text(data, source, kind)
    try:
        from_json(text)  # For the message: json.loads cannot tell that the text was cut off.
        value = json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        raise _syntax_error(text, source, str(error), kind) from error
    return value, _repeated_keys(value, source, "")


def read_text(data: bytes, source: str, kind: FileKind) -> str:
    """Decode UTF-8. Raises the kind's error for other bytes, and for a file without text."""
    try:
        # "-sig" because some Windows editors start the file with a byte order mark.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x}, which is not UTF-8 ({error.reason})"
        where = f"{source}: byte {error.start}"
        raise unreadable(source, where, found, "Save the file as UTF-8.", kind) from error
    if not text.strip():
        raise unreadable(source, source, "an empty file", f"Write the {kind.name} again.", kind)
    return text


def unreadable(source: str, where: str, found: str, remedy: str, kind: FileKind) -> ZorseError:
    """Make the error for a file that has no value at all."""
    expected = f"{kind.with_article} in {kind.syntax}, in UTF-8"
    problem = Problem(where=where, found=found, expected=expected, remedy=remedy)
    return kind.error(f"{source} is not {kind.with_article}", [problem])


def layout(value: Any, indent: int = 0) -> str:
    """Lay out JSON with two spaces of indentation; short things and plain lists get one line.

    Of a list of several objects or lists, each entry gets a line of its own at least.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_table = isinstance(value, list) and len(value) > 1
    is_short = indent > 0 and not is_table and indent + len(line) <= _LINE_WIDTH
    if is_short or not _is_nested(value):
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        keys = [json.dumps(key, ensure_ascii=False) for key in value]
        items = [
            f"{pad}{key}: {layout(item, indent + 2)}"
            for key, item in zip(keys, value.values(), strict=True)
        ]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    items = [pad + layout(item, indent + 2) for item in value]
    return "[\n" + ",\n".join(items) + "\n" + " " * indent + "]"


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, dict | list) for item in value)
    return isinstance(value, dict) and bool(value)


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    result = JsonObject(pairs)
    if len(result) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        result.repeated = tuple(key for key, count in counts.items() if count > 1)
    return result


def repeated_key(where: str, key: str) -> Problem:
    """What is wrong with an object in which a key comes again."""
    return Problem(
        where=where,
        found=f'key "{key}" more than once',
        expected="every key of an object once",
        remedy="Keep one of them; other messages are about the last one.",
    )


def _repeated_keys(value: Any, source: str, path: str) -> list[Problem]:
    problems = []
    if isinstance(value, JsonObject):
        for key in value.repeated:
            problems.append(repeated_key(f"{source}: {path or 'top level'}", key))
        for key, item in value.items():
            problems += _repeated_keys(item, source, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            problems += _repeated_keys(item, source, f"{path}[{index}]")
    return problems


def _syntax_error(text: str, source: str, message: str, kind: FileKind) -> ZorseError:
    reason, _, position = message.rpartition(" at ")
    if reason.startswith("EOF"):
        found = "the end of the file in the middle of the JSON: it looks cut off"
        remedy = "Copy or write the file again, whole."
    else:
        found = f"text that is not JSON ({reason})"
        remedy = "JSON has no comments, no trailing commas, and double quotes only."
    return unreadable(source, f"{source}: {position}", found, remedy, kind)
