"""Compares the table of flags, and what is judged by it, with Megatron's own parser; one rank."""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any, NoReturn

from tests.flag_samples import all_words
from tests.megatron.comparison import LAYOUTS
from zorse_megatron.adapter.arguments.stock_parser import as_json, flags_of_parser, stock_parser
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.rules import command_problems
from zorse_megatron.flags.table import TABLE_FILE


class Refused(Exception):
    """argparse does not take the words."""


def refuse(message: str) -> NoReturn:
    raise Refused(message)


def parsed(parser: ArgumentParser, words: list[str]) -> Namespace | None:
    """What a run's parser makes of the words; None where it refuses them."""
    try:
        return parser.parse_args(words)
    except Refused:
        return None


def differing(parser: ArgumentParser) -> list[Any]:
    """Words that the table reads or judges otherwise than Megatron's parser and a run."""
    plan, found = LAYOUTS["2|1"], []
    for words in all_words():
        ours, theirs = read_command(words), parsed(parser, words)
        is_refused = bool(ours.problems or ours.unknown)
        if theirs is None or is_refused:
            if (theirs is None) != is_refused:
                found.append([words, list(map(str, ours.problems)), "of another mind"])
            continue
        values = {name: as_json(value) for name, value in vars(theirs).items()}
        name = next(iter(ours.given))
        is_opaque = isinstance(vars(ours.args)[name], str) and not isinstance(values[name], str)
        if not is_opaque and vars(ours.args) != {**values, "local_rank": ours.args.local_rank}:
            found.append([words, vars(ours.args)[name], values[name]])
        judged = [list(map(str, command_problems(args, plan))) for args in (ours.args, theirs)]
        if [len(each) for each in judged] != [len(judged[0])] * 2:
            found.append([words, *judged])
    return found


def main() -> None:
    parser = stock_parser()
    parser.error = refuse  # type: ignore[method-assign]
    rows = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    installed = flags_of_parser()
    answer = {
        "missing": [row for row in installed if row not in rows],
        "gone": [row for row in rows if row not in installed],
        "same_order": rows == installed,
        "differing": differing(parser),
        "number": len(all_words()),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
