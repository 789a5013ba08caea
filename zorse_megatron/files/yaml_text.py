"""YAML as text: reading it strictly, with the line of every value.

PyYAML reads YAML 1.1, where `1e9` is a string, `yes` a boolean, `1:30` the number 90 and
`2024-01-01` a date. Files here mean what YAML 1.2 says: only true, false, null and numbers (1e9 is
one) are not strings. Keys given twice, anchors and tags are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

import yaml

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.json_text import read_json, read_text, repeated_key, unreadable
from zorse_megatron.files.strict import FileKind

_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
# Deeper than any file of ours; beyond it Python's own recursion limit is near.
_MAX_DEPTH = 50
_MAX_EVENTS = 250_000
_TOO_MANY = (
    f"more than {_MAX_EVENTS:,} keys and values up to here",
    "Nodes that are equal need one entry, with their `count`.",
)
# libyaml, where PyYAML was built with it, takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TOO_DEEP = ("values nested too deeply", "Use the documented keys only.")


def read_table(package: str, name: str) -> Any:
    """Return what is in a YAML file of a package of ours, which needs no checks."""
    text = files(package).joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)


class _Unreadable(Exception):
    """Something that is YAML but not ours: where it is, what it is, what to do."""

    def __init__(self, mark: Any, found: str, remedy: str) -> None:
        super().__init__(found)
        self.line, self.found, self.remedy = mark.line + 1, found, remedy


def read_yaml(
    data: bytes, source: str, kind: FileKind
) -> tuple[Any, dict[str, int], list[Problem]]:
    """Parse UTF-8 YAML: the value, the line of each path, a Problem for each repeated key.

    A file that is called .json has to be JSON, which is YAML but for its tabs. Raises the kind's
    error when there is no value to return.
    """
    as_json = None
    if source.lower().endswith(".json"):
        as_json = read_json(data, source, replace(kind, syntax="JSON"))
    text = read_text(data, source, kind)
    reader = _Reader(source, _events(text))
    try:
        value = reader.document()
    except _Comments as error:
        remedy = f"Write the {kind.name} again."
        raise unreadable(source, source, "comments only", remedy, kind) from error
    except yaml.YAMLError as error:
        if as_json is not None:
            return as_json[0], {}, as_json[1]
        raise _syntax_error(error, source, kind) from error
    except _Unreadable as error:
        where = f"{source}: line {error.line}"
        raise unreadable(source, where, error.found, error.remedy, kind) from error
    return value, reader.lines, reader.problems


class _Comments(Exception):
    """There is no document."""


def _events(text: str) -> Iterator[yaml.Event]:
    """What the parser reads; what files of ours never have is refused where it stands.

    An alias could stand for a thousand others, and so on: it is refused before it does.
    """
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            remedy = "Write the value out at each place; `count` repeats equal nodes."
            raise _Unreadable(event.start_mark, "an anchor or alias (& or *)", remedy)
        if getattr(event, "tag", None) is not None:
            raise _Unreadable(event.start_mark, f"a tag ({event.tag})", "Remove the tag.")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _Unreadable(event.start_mark, *_TOO_DEEP)
        if count >= _MAX_EVENTS:
            raise _Unreadable(event.start_mark, *_TOO_MANY)
        yield event


class _Reader:
    """Turns the parser's events into plain values."""

    def __init__(self, source: str, events: Iterator[yaml.Event]) -> None:
        self.source = source
        self.events = events
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []

    def document(self) -> Any:
        """Return the value of the only document."""
        next(self.events)  # the stream begins
        if not isinstance(next(self.events), yaml.DocumentStartEvent):
            raise _Comments
        value = self.value(next(self.events), "")
        next(self.events)  # the document ends
        further = next(self.events)
        if isinstance(further, yaml.DocumentStartEvent):
            raise yaml.MarkedYAMLError(
                problem="another document begins", problem_mark=further.start_mark
            )
        return value

    def value(self, event: yaml.Event, path: str) -> Any:
        """Return the value that begins with an event and note the lines of all that is in it."""
        self.lines.setdefault(path, event.start_mark.line + 1)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(item := next(self.events), yaml.SequenceEndEvent):
                items.append(self.value(item, f"{path}[{len(items)}]"))
            return items
        return _scalar(event)

    def _mapping(self, path: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                found = "a key that is not plain text"
                raise _Unreadable(event.start_mark, found, "Use the documented keys only.")
            key, line = event.value, event.start_mark.line + 1
            if key in result:
                where = f"{self.source}: line {line}: {path or 'top level'}"
                self.problems.append(repeated_key(where, key))
            inner = f"{path}.{key}" if path else key
            self.lines[inner] = line
            result[key] = self.value(next(self.events), inner)
        return result


def _scalar(node: yaml.ScalarEvent) -> Any:
    text = node.value
    if not text.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in text):
        raise _Unreadable(node.start_mark, "half of a surrogate pair", "Write the sign itself.")
    if node.style in ("'", '"', "|", ">"):
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        if _INT.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text
    except ValueError:  # More digits than Python converts.
        return float("inf")


def _syntax_error(error: yaml.YAMLError, source: str, kind: FileKind) -> ZorseError:
    mark = getattr(error, "problem_mark", None)
    if mark and "nesting depth" in str(getattr(error, "problem", "")):  # PyYAML 6.0.4, libyaml
        return unreadable(source, f"{source}: line {mark.line + 1}", *_TOO_DEEP, kind)
    where = f"{source}: line {mark.line + 1} column {mark.column + 1}" if mark else source
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    remedy = "Check indentation (spaces only), colons, and quotes around texts with special signs."
    return unreadable(source, where, f"text that is not YAML ({reason})", remedy, kind)
