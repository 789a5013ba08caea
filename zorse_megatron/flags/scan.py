"""Finds some flags among the words of a training command, as argparse takes them.

Megatron's parser allows no abbreviations (`megatron.training.arguments.parse_args`), and neither
does this one. What a flag may be followed by is said as for argparse's `nargs`.
"""

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from zorse_megatron.errors import FlagError, Problem

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
