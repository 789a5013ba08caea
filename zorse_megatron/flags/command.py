"""A training command as Megatron's parser reads it, and all that is wrong with it.

argparse tells flags from values (`command.py`). Values are converted and checked here, so that all
that is wrong is collected, where argparse stops at the first error.
"""

import argparse
import difflib
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.flags.table import Flag, by_spelling, defaults
from zorse_megatron.inputs.lora import LORA_FLAG, Lora, parse_lora

# Finds some flags among the words of a training command, as argparse takes them.
#
# Megatron's parser allows no abbreviations (`megatron.training.arguments.parse_args`), and neither
# does this one. What a flag may be followed by is said as for argparse's `nargs`.


Nargs = Literal[0, "?", "*"]
_OURS = "--zorse-"
# A word that begins with two dashes is a flag. argparse takes one with a space for a value where it
# does not know the flag, as it does not know `--data-path` of `--data-path=my/two words` here.
_SPACE = "\0"
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse takes these for values


@dataclass(frozen=True, kw_only=True)
class Given:
    """A flag, once."""

    flag: str
    values: tuple[str, ...]


def split_script(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the script in front of the flags, if there is one, and the flags.

    >>> split_script(["pretrain_gpt.py", "--bf16"])
    ('pretrain_gpt.py', ('--bf16',))
    """
    if words and words[0].endswith(".py") and not words[0].startswith("-"):
        return words[0], tuple(words[1:])
    return None, tuple(words)


def find_flags(
    words: Sequence[str], flags: Mapping[str, Nargs]
) -> tuple[list[Given], tuple[str, ...]]:
    """Return these flags as often as they are given, and the words that belong to none of them.

    Raises FlagError for a value after the "=" of a flag that takes none.
    """
    found: list[Given] = []
    wanted = tuple((flag.replace(" ", _SPACE), nargs) for flag, nargs in flags.items())
    try:
        _, rest = _parser(wanted).parse_known_args(
            [word.replace(" ", _SPACE) if word.startswith("--") else word for word in words],
            argparse.Namespace(found=found),
        )
    except argparse.ArgumentError as error:
        problem = Problem(
            where=str(error.argument_name),
            found="a value after it",
            expected="it without a value",
            remedy="Megatron's own parser refuses it, too; correct the command.",
        )
        raise FlagError("The command cannot be used", [problem]) from error
    return found, tuple(word.replace(_SPACE, " ") for word in rest)


def last_values(words: Sequence[str], flags: Collection[str]) -> dict[str, str | None]:
    """Return those of the flags that are given, each with its last value; None: no value follows.

    >>> last_values(["--save", "a", "--lr=1", "--save=b", "--bf16"], ["--save", "--bf16"])
    {'--save': 'b', '--bf16': None}
    """
    found, _ = find_flags(words, dict.fromkeys(flags, "?"))
    return {given.flag: next(iter(given.values), None) for given in found}


def split_ours(words: Sequence[str]) -> tuple[list[Given], tuple[str, ...]]:
    """Return our own flags, misspelt ones too, and Megatron's words. Each of ours has one value."""
    ours = (word.partition("=")[0] for word in words if word.startswith(_OURS))
    return find_flags(words, dict.fromkeys(ours, "?"))


def split_rest(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags in what `find_flags` left over, and the values that follow none.

    What follows "--" belongs to it, as for argparse.
    """
    flags: list[str] = []
    strays: list[str] = []
    for word in rest:
        if word.startswith("--") or not _is_value(word):
            flags.append(word.partition("=")[0])
            if word == "--":
                break
        elif not flags:
            strays.append(word)
    return flags, strays


def _is_value(word: str) -> bool:
    is_number = _NUMBER.fullmatch(word) is not None
    return not word.startswith("-") or word == "-" or is_number or " " in word


class _Keep(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        texts = values if isinstance(values, list) else [] if values is None else [values]
        found = tuple(text.replace(_SPACE, " ") for text in texts)
        flag = str(option_string).replace(_SPACE, " ")
        namespace.found.append(Given(flag=flag, values=found))


@lru_cache(maxsize=64)
def _parser(flags: tuple[tuple[str, Nargs], ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, nargs in flags:
        parser.add_argument(flag, nargs=nargs, action=_Keep, default=argparse.SUPPRESS)
    return parser


_HELP = ("-h", "--help")  # argparse prints it and stops
_BAD = object()
UPSTREAM_SCRIPT = "pretrain_gpt.py"
# Of letters in common: a slip of the keyboard, and no other word.
_SLIP = 0.88


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
    """Read what follows `python -m zorse_megatron.pretrain`.

    Of our own flags, which a run reads itself, only `--zorse-lora` is about the model: where it is
    given, its adapters are in `args.zorse_lora`.
    """
    script, flags = split_script(words)
    ours, rest = split_ours(flags)
    args = Namespace(
        **{name: list(v) if isinstance(v, list) else v for name, v in defaults().items()}
    )
    set_here: set[str] = set()
    problems: list[Problem] = []
    if (lora := _lora_of(ours, problems)) is not None:
        args.zorse_lora = lora
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


def _lora_of(ours: Sequence[Given], problems: list[Problem]) -> Lora | None:
    """Read the adapters that our flags ask for; notes problems."""
    texts = [next(iter(each.values), None) for each in ours if each.flag == LORA_FLAG]
    return parse_lora(texts[-1], problems) if texts else None


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


def unknown_problems(words: Sequence[str], known: Iterable[str]) -> list[Problem]:
    """The flags among the words that a parser does not know. `known`: all that it does."""
    names = list(known)
    _, others = find_flags(words, dict.fromkeys(names, "*"))
    unknown, _ = split_rest(others)
    return [_unknown(each, names) for each in dict.fromkeys(unknown)]


def unknown_flags(command: Command) -> tuple[list[Problem], list[str]]:
    """Problems and notes, where the script's own parser cannot be asked.

    Our own entry and upstream's pretrain_gpt.py add no flags. Another script may: of its flags only
    those are refused that look like a slip and do not stand in its text; a run asks its parser.
    """
    known = list(by_spelling())
    problems, notes = [], []
    text = _text_of(command.script)
    may_add = command.script is not None and Path(command.script).name != UPSTREAM_SCRIPT
    for flag in command.unknown:
        is_slip = bool(difflib.get_close_matches(flag, known, n=1, cutoff=_SLIP))
        if may_add and (f'"{flag}"' in text or f"'{flag}'" in text):
            continue
        if may_add and not is_slip:
            notes.append(
                f"{flag} is no flag of Megatron's; {command.script} must add it to its parser"
            )
            continue
        problems.append(_unknown(flag, known))
    return problems, notes


def _unknown(flag: str, known: Sequence[str]) -> Problem:
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    hint = f"Did you mean {close[0]}?" if close else "Remove it."
    return Problem(
        where=flag,
        found="a flag that neither Megatron's parser nor the script has",
        expected="a flag of megatron-core 0.19, or one that the script adds",
        remedy=hint,
    )


def _text_of(script: str | None) -> str:
    """The script's text; empty where it cannot be read here."""
    try:
        return "" if script is None else Path(script).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
