"""`zorse launch --follow`: the command that runs beside the training and moves it."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.errors import Problem
from zorse_megatron.flags.scan import last_values

Follow = Annotated[
    str | None,
    typer.Option(
        "--follow",
        metavar="OPTIONS",
        help="Run zorse follow beside rank 0, with these options in quotes: "
        "--follow '--profile profile.json --gain 0.1'. Needs --zorse-status in the training "
        "command.",
    ),
]
_STATUS = "--zorse-status"
_OWN = ("--cluster", "--once", "--json", "--")


def follow_words(
    text: str | None, given: Sequence[str], cluster: Path, *, is_elastic: bool
) -> tuple[str, ...]:
    """Return the words after `python -m zorse_megatron`; none if it was not asked for.

    `given`: the training command. Raises CommandError for options that zorse follow would refuse.
    """
    if text is None:
        return ()
    status = last_values(given, [_STATUS]).get(_STATUS)
    problems = list(_problems(text, status, is_elastic=is_elastic))
    if problems or status is None:
        raise CommandError("the command cannot be run", problems)
    options = shlex.split(text)
    words = ("follow", status, "--cluster", str(cluster), *options)
    _refuse_usage(words[1:])
    return (*words, "--", *given)


def _problems(text: str, status: str | None, *, is_elastic: bool) -> Iterator[Problem]:
    if is_elastic:
        yield Problem(
            where="--follow",
            found="it with --elastic",
            expected="one of the two: another attempt may be on other nodes",
            remedy="Run zorse follow by hand beside an attempt, with that attempt's cluster file.",
        )
    if not status:
        yield Problem(
            where="--follow",
            found=f"no {_STATUS} in the training command",
            expected="a directory where the run keeps its status, to follow it by",
            remedy=f"Add {_STATUS} DIR.",
        )
    try:
        words = shlex.split(text)
    except ValueError as error:
        yield Problem(
            where="--follow",
            found=f"{text!r} ({error})",
            expected="options, quoted as in a shell",
            remedy="Check the quotes.",
        )
        return
    for word in words:
        if word.partition("=")[0] in _OWN:
            yield Problem(
                where="--follow",
                found=f"{word.partition('=')[0]} in it",
                expected="other options of zorse follow",
                remedy="Leave it out.",
            )


def _refuse_usage(words: Sequence[str]) -> None:
    """Raise CommandError for what the command line of zorse follow cannot be."""
    from zorse_megatron.cli.main import app

    command = typer.main.get_command(app).commands["follow"]  # type: ignore[attr-defined]
    usage: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        command.make_context("zorse follow", list(words))
    except usage as error:
        problem = Problem(
            where="--follow",
            found=error.format_message(),  # type: ignore[attr-defined]
            expected="options of zorse follow",
            remedy="Run: zorse follow --help.",
        )
        raise CommandError("the command cannot be run", [problem]) from error
