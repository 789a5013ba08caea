"""Options of the commands that plan again for the nodes that are left."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.errors import Problem
from zorse_megatron.launch.elastic.replan import DEFAULT_LIMIT_S

Without = Annotated[
    list[str] | None,
    typer.Option(metavar="NODE", help="A node that is lost, by its name; repeatable."),
]
PlansDirectory = Annotated[
    Path,
    typer.Option(
        "--plans",
        metavar="DIR",
        help="Directory for the cluster files and plans for fewer nodes, each searched once; all "
        "nodes must see it.",
    ),
]
MinGpus = Annotated[
    int, typer.Option(min=1, help="With fewer GPUs the job ends instead of going on.")
]
PlanOptions = Annotated[
    str,
    typer.Option(
        metavar="OPTIONS",
        help="Options of zorse plan for planning again, in quotes: "
        "--plan-options '--profile profile.json --max-tp 1'.",
    ),
]
PlanLimit = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=1, help="How long planning again may take."),
]
DEFAULT_PLANS = Path("plans-for-fewer-nodes")
DEFAULT_PLAN_LIMIT_S = DEFAULT_LIMIT_S

_NOT_AGAIN = ("--cluster", "--out", "--output", "--json", "--model", "--html", "--")


def plan_options_of(text: str) -> tuple[str, ...]:
    """Return the words of `--plan-options`; see `plan_options_problems`."""
    return tuple(shlex.split(text))


def plan_options_problems(text: str) -> Iterator[Problem]:
    """Yield what cannot be given to `zorse plan` once more."""
    where = "--plan-options"
    try:
        words: Sequence[str] = shlex.split(text)
    except ValueError as error:
        yield Problem(
            where=where,
            found=f"{text!r} ({error})",
            expected="options, quoted as in a shell",
            remedy="Check the quotes.",
        )
        return
    for word in words:
        name = word.partition("=")[0]
        if name in _NOT_AGAIN:
            yield Problem(
                where=where,
                found=f"{name} in it",
                expected="options that say how to search",
                remedy="Leave it out: files and training command are given where the job is.",
            )
