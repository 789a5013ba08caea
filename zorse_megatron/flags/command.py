"""A training command as Megatron's argument parser reads it, without Megatron.

Words are taken for flags and values as `argparse` of Python 3.12 does, without abbreviations
(`megatron.training.arguments.parse_args`). All that is wrong is collected, where argparse stops at
the first error.
"""

import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.flags.table import Flag, by_spelling, defaults

_OURS = "--zorse-"
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse takes these for values
_HELP = ("-h", "--help")  # argparse prints it and stops
_BAD = object()


@dataclass(frozen=True, kw_only=True)
class Command:
    """A training command, read."""

    script: str | None
    """The user's training script; None: our own GPT entry."""
    args: Namespace
    """Each argument of Megatron's parser, as given or by default; of enumerations the name."""
    given: frozenset[str]
    """Arguments that the command sets itself."""
    unknown: tuple[str, ...]
    """Flags that Megatron's parser does not have, in order."""
    problems: tuple[Problem, ...]
    """Values that Megatron's parser would refuse, and words that belong to no flag."""


def read_command(words: Sequence[str]) -> Command:
    """Read what stands behind `python -m zorse_megatron.pretrain`; our own flags are skipped."""
    script, rest = _split(words)
    args = Namespace(
        **{name: list(v) if isinstance(v, list) else v for name, v in defaults().items()}
    )
    given: set[str] = set()
    unknown: list[str] = []
    problems: list[Problem] = []
    for spelling, explicit, values in _options(rest):
        flag = by_spelling().get(spelling)
        if spelling in _HELP:
            continue
        if flag is None and spelling.startswith("-"):
            unknown.append(spelling)
            continue
        if flag is None:
            problems.append(_stray(spelling))
            continue
        value, strays = _value(flag, spelling, explicit, values, problems)
        problems += map(_stray, strays)
        if value is not _BAD:
            given.add(flag.name)
            setattr(args, flag.name, value)
    return Command(
        script=script,
        args=args,
        given=frozenset(given),
        unknown=tuple(dict.fromkeys(unknown)),
        problems=tuple(problems),
    )


def spellings_given(words: Sequence[str], known: Collection[str]) -> list[str]:
    """What a parser with these flags would take for flags among the words."""
    found = []
    for word in words:
        spelling = word if word in known else word.partition("=")[0]
        if spelling in known or not _is_value(word):
            found.append(spelling)
    return found


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The script, and all words but those of our own flags."""
    rest = list(words)
    script = rest.pop(0) if rest and rest[0].endswith(".py") and rest[0][0] != "-" else None
    kept: list[str] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith(_OURS):
            kept.append(word)
        elif "=" not in word and rest and not rest[0].startswith("--"):
            rest.pop(0)
    return script, kept


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yield (flag or stray word, value behind "=", following values)."""
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        spelling, explicit = _spelling(word)
        values: list[str] = []
        while spelling is not None and position < len(words) and _is_value(words[position]):
            values.append(words[position])
            position += 1
        yield spelling or word, explicit, values


def _spelling(word: str) -> tuple[str | None, str | None]:
    """The flag that a word is, with the value in it; None for a value."""
    if _is_value(word):
        return None, None
    if word in by_spelling() or "=" not in word:
        return word, None
    spelling, _, explicit = word.partition("=")
    return spelling, explicit


def _is_value(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return True
    if word.partition("=")[0] in by_spelling():
        return False
    return _NUMBER.fullmatch(word) is not None or " " in word


def _value(
    flag: Flag, spelling: str, explicit: str | None, values: list[str], problems: list[Problem]
) -> tuple[Any, list[str]]:
    """What the argument is set to, and words that do not belong to the flag."""
    if flag.kind != "store":
        if explicit is not None:
            problems.append(_bad(spelling, f'"{explicit}" behind it', "it without a value"))
            return _BAD, values
        is_on = flag.kind == "true" or (flag.kind == "boolean" and not _is_negated(flag, spelling))
        return is_on, values
    texts, strays = ([explicit], values) if explicit is not None else (values, [])
    if flag.nargs is None or isinstance(flag.nargs, int):
        wanted = flag.nargs or 1
        texts, strays = texts[:wanted], [*texts[wanted:], *strays]
        if len(texts) < wanted:
            problems.append(_bad(spelling, _counted(len(texts)), _counted(wanted)))
            return _BAD, strays
    elif flag.nargs == "+" and not texts:
        problems.append(_bad(spelling, "no value", "one value or more"))
        return _BAD, strays
    converted = [_converted(flag, spelling, text, problems) for text in texts]
    if any(each is _BAD for each in converted):
        return _BAD, strays
    return converted[0] if flag.nargs is None else converted, strays


def _converted(flag: Flag, spelling: str, text: str, problems: list[Problem]) -> Any:
    """One value in its type; a problem is noted where it has no such value."""
    value: Any = text
    if flag.type in ("int", "float"):
        try:
            value = int(text) if flag.type == "int" else float(text)
        except ValueError:
            kind = "an integer" if flag.type == "int" else "a number"
            problems.append(_bad(spelling, f'"{text}"', kind))
            return _BAD
    if flag.choices is not None and value not in flag.choices:
        listed = ", ".join(map(str, flag.choices))
        problems.append(_bad(spelling, f'"{text}"', f"one of {listed}"))
        return _BAD
    return value


def _is_negated(flag: Flag, spelling: str) -> bool:
    return spelling.startswith("--no-") and spelling != flag.spellings[0]


def _counted(count: int) -> str:
    return {0: "no value", 1: "one value"}.get(count, f"{count} values")


def _bad(spelling: str, found: str, expected: str) -> Problem:
    remedy = "Megatron's own parser refuses it, too; correct the command."
    return Problem(where=spelling, found=found, expected=expected, remedy=remedy)


def _stray(word: str) -> Problem:
    return Problem(
        where="the training command",
        found=f'"{word}", which belongs to no flag',
        expected="flags with their values",
        remedy="Remove it, or give the flag that it belongs to.",
    )
