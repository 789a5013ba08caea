"""YAML as text: reading it strictly, with the line of every value.

PyYAML reads YAML 1.1, where `1e9` is a string, `yes` a boolean, `1:30` the number 90 and
`2024-01-01` a date. Files here mean what YAML 1.2 says: only true, false, null and numbers (1e9 is
one) are not strings. Keys given twice, anchors and tags are refused.
"""

import re
from typing import Any

import yaml

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.schema.file_kind import FileKind
from zorse_megatron.schema.json_text import read_text, unreadable

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
_TOO_DEEP = ("values nested too deeply", "Use the documented keys only.")


class _Unreadable(Exception):
    """Something that is YAML but not ours: where it is, what it is, what to do."""

    def __init__(self, mark: Any, found: str, remedy: str) -> None:
        super().__init__(found)
        self.line, self.found, self.remedy = mark.line + 1, found, remedy


def read_yaml(
    data: bytes, source: str, kind: FileKind
) -> tuple[Any, dict[str, int], list[Problem]]:
    """Parse UTF-8 YAML: the value, the line of each path, a Problem for each repeated key.

    Raises the kind's error when there is no value to return.
    """
    text = read_text(data, source, kind)
    reader = _Reader(source)
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = reader.value(node, "", 0) if node is not None else None
    except RecursionError as error:
        raise unreadable(source, source, *_TOO_DEEP, kind) from error
    except yaml.YAMLError as error:
        raise _syntax_error(error, source, kind) from error
    except _Unreadable as error:
        where = f"{source}: line {error.line}"
        raise unreadable(source, where, error.found, error.remedy, kind) from error
    if node is None:
        raise unreadable(source, source, "comments only", f"Write the {kind.name} again.", kind)
    return value, reader.lines, reader.problems


class _Loader(yaml.SafeLoader):
    """Composes nodes; an alias is refused before it can stand for a thousand others."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            remedy = "Write the value out at each place; `count` repeats equal nodes."
            raise _Unreadable(event.start_mark, "an anchor or alias (& or *)", remedy)
        if getattr(event, "tag", None) is not None:
            raise _Unreadable(event.start_mark, f"a tag ({event.tag})", "Remove the tag.")
        return super().compose_node(parent, index)


class _Reader:
    """Turns composed nodes into plain values."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []

    def value(self, node: yaml.Node, path: str, depth: int) -> Any:
        """Return the value of a node and note the lines of all that is in it."""
        self.lines.setdefault(path, node.start_mark.line + 1)
        if depth > _MAX_DEPTH:
            raise _Unreadable(node.start_mark, *_TOO_DEEP)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return [self.value(item, f"{path}[{index}]", depth + 1) for index, item in items]
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                found = "a key that is not plain text"
                raise _Unreadable(key_node.start_mark, found, "Use the documented keys only.")
            if key in result:
                self.problems.append(self._repeated(path, key, line))
            inner = f"{path}.{key}" if path else key
            self.lines[inner] = line
            result[key] = self.value(value_node, inner, depth + 1)
        return result

    def _repeated(self, path: str, key: str, line: int) -> Problem:
        return Problem(
            where=f"{self.source}: line {line}: {path or 'top level'}",
            found=f'key "{key}" more than once',
            expected="every key of an object once",
            remedy="Keep one of them; other messages are about the last one.",
        )


def _scalar(node: yaml.Node) -> Any:
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
    where = f"{source}: line {mark.line + 1} column {mark.column + 1}" if mark else source
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    remedy = "Check indentation (spaces only), colons, and quotes around texts with special signs."
    return unreadable(source, where, f"text that is not YAML ({reason})", remedy, kind)
