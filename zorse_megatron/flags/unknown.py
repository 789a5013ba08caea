"""Flags that Megatron's parser does not have: misspelt ones, or the script's own."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from zorse_megatron.errors import Problem
from zorse_megatron.flags.command import Command
from zorse_megatron.flags.scan import find_flags, split_rest
from zorse_megatron.flags.table import by_spelling

UPSTREAM_SCRIPT = "pretrain_gpt.py"
# Of letters in common: a slip of the keyboard, and no other word.
_SLIP = 0.88


def unknown_problems(words: Sequence[str], known: Iterable[str]) -> list[Problem]:
    """The flags among the words that a parser does not know. `known`: all that it does."""
    names = list(known)
    _, others = find_flags(words, dict.fromkeys(names, "*"))
    unknown, _ = split_rest(others)
    return [_problem(each, names) for each in dict.fromkeys(unknown)]


def unknown_flag_findings(command: Command) -> tuple[list[Problem], list[str]]:
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
        problems.append(_problem(flag, known))
    return problems, notes


def _problem(flag: str, known: Sequence[str]) -> Problem:
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
