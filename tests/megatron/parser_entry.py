"""Compares the table of flags, and what is judged by it, with Megatron's own parser; one rank."""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any, NoReturn

from scripts.write_megatron_flags import flags_of_parser, stock_parser
from tests.flag_samples import all_words
from tests.megatron.plans import LAYOUTS
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.flags.command import Command, read_command
from zorse_megatron.flags.table import TABLE_FILE, as_json

PLAN = LAYOUTS["2|1"]
TOGETHER = 32  # samples that one command has at first


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


def differing(parser: ArgumentParser, samples: list[list[str]]) -> list[Any]:
    """Samples that the table reads or judges otherwise than Megatron's parser and a run.

    Many are read as one command, which takes as long as one; where it differs, each half of them.
    """
    ours = read_command(words := [word for sample in samples for word in sample])
    theirs = parsed(parser, words)
    is_refused = bool(ours.problems or ours.unknown)
    difference: list[Any] | None = None
    if theirs is None or is_refused:
        if (theirs is None) != is_refused:
            difference = [words, list(map(str, ours.problems)), "of another mind"]
        elif len(samples) > 1:
            difference = [words, "one may hide others"]
    elif len(ours.given) < len(samples):
        difference = [words, "a flag given twice"]
    else:
        difference = _differs(ours, theirs)
    if difference is None or len(samples) == 1:
        return [] if difference is None else [difference]
    half = len(samples) // 2
    return [*differing(parser, samples[:half]), *differing(parser, samples[half:])]


def _differs(ours: Command, theirs: Namespace) -> list[Any] | None:
    """What two readings of a command that both take differ in."""
    read = vars(ours.args)
    values = {name: as_json(value) for name, value in vars(theirs).items()}
    for name in ours.given:
        # Of a type that the table does not know: left as it was written.
        if isinstance(read[name], str) and not isinstance(values[name], str):
            values[name] = read[name]
    if read != {**values, "local_rank": read["local_rank"]}:
        return [[name, read[name], values.get(name)] for name in read if read[name] != values[name]]
    judged = [list(map(str, check_arguments(args, PLAN))) for args in (ours.args, theirs)]
    return None if len(judged[0]) == len(judged[1]) else judged


def commands(samples: list[list[str]]) -> list[list[list[str]]]:
    """So many samples each, which are far from one another, as those of one flag are not."""
    number = -(-len(samples) // TOGETHER)
    return [samples[first::number] for first in range(number)]


def main() -> None:
    parser = stock_parser()
    parser.error = refuse  # type: ignore[method-assign]
    rows = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    installed = flags_of_parser()
    answer = {
        "missing": [row for row in installed if row not in rows],
        "gone": [row for row in rows if row not in installed],
        "same_order": rows == installed,
        "differing": [each for some in commands(all_words()) for each in differing(parser, some)],
        "number": len(all_words()),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
