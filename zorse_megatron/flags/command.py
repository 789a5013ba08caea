"""A training command as Megatron's argument parser reads it, without Megatron.

argparse tells flags from values (`scan.py`). Values are converted and checked here, so that all
that is wrong is collected, where argparse stops at the first error.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.flags.scan import Given, find_flags, split_ours, split_rest, split_script
from zorse_megatron.flags.table import Flag, by_spelling, defaults

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
    """Read what follows `python -m zorse_megatron.pretrain`; our own flags are skipped."""
    script, flags = split_script(words)
    _, rest = split_ours(flags)
    args = Namespace(
        **{name: list(v) if isinstance(v, list) else v for name, v in defaults().items()}
    )
    set_here: set[str] = set()
    problems: list[Problem] = []
    found, others = find_flags(rest, dict.fromkeys(by_spelling(), "*"))
    for given in found:
        flag = by_spelling()[given.flag]
        is_joined = any(f"{given.flag}={value}" in rest for value in given.values[:1])
        value, strays = _value(flag, given, is_joined, problems)
        problems += map(_stray, strays)
        if value is not _BAD:
            set_here.add(flag.name)
            setattr(args, flag.name, value)
    unknown, strays = split_rest(others)
    problems += map(_stray, strays)
    return Command(
        script=script,
        args=args,
        given=frozenset(set_here),
        unknown=tuple(dict.fromkeys(each for each in unknown if each not in _HELP)),
        problems=tuple(problems),
    )


def _value(
    flag: Flag, given: Given, is_joined: bool, problems: list[Problem]
) -> tuple[Any, Sequence[str]]:
    """What the argument is set to, and words that do not belong to the flag.

    `is_joined`: the value is after a "=".
    """
    spelling, texts = given.flag, given.values
    strays: Sequence[str] = ()
    if flag.kind != "store":
        if is_joined:
            problems.append(_bad(spelling, f'"{texts[0]}" after it', "it without a value"))
            return _BAD, ()
        is_on = flag.kind == "true" or (flag.kind == "boolean" and not _is_negated(flag, spelling))
        return is_on, texts
    if flag.nargs is None or isinstance(flag.nargs, int):
        wanted = flag.nargs or 1
        texts, strays = texts[:wanted], texts[wanted:]
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
