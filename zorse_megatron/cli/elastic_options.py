"""Options of the commands that plan again for the nodes that are left."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import is_given
from zorse_megatron.errors import Problem
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.launch.elastic.replan import DEFAULT_LIMIT_S
from zorse_megatron.launch.training_command import TrainingCommand

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
WEEK_S = 604_800
"""Longer than anybody waits; what sleeps and waits is given as seconds has to end somewhere."""
PlanLimit = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=1, max=WEEK_S, help="How long planning again may take."),
]
DEFAULT_PLANS = Path("plans-for-fewer-nodes")
DEFAULT_PLAN_LIMIT_S = DEFAULT_LIMIT_S

_NOT_AGAIN = (
    "--cluster",
    "--out",
    "--output",
    "--json",
    "--model",
    "--html",
    "--from-status",
    "--without",
    "--",
)


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


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What a job is to do when nodes are lost, as it is written into its script."""

    plans: Path
    min_gpus: int
    plan_options: str
    plan_limit_s: float

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with them."""
        yield from plan_options_problems(self.plan_options)
        yield from folder_problems("--plans", self.plans)

    def words(self) -> list[str]:
        """As options of a command."""
        more = ["--plan-options", self.plan_options] if self.plan_options else []
        return [
            *("--plans", str(self.plans), "--min-gpus", str(self.min_gpus), *more),
            *("--plan-limit", f"{self.plan_limit_s:g}"),
        ]


Elastic = Annotated[
    bool,
    typer.Option(
        "--elastic",
        help="When nodes are lost, plan again for those that are left and go on from the newest "
        "checkpoint. Needs real host names in the cluster file, and --save.",
    ),
]
_ONLY_ELASTIC = ("plans", "min_gpus", "plan_options", "plan_limit")


def refuse_odd_elastic(
    context: typer.Context, options: ElasticOptions, *, is_elastic: bool
) -> None:
    """Raise CommandError for what is wrong with the options, or would be ignored."""
    problems: list[Problem] = []
    if is_elastic:
        problems += options.problems()
    else:
        problems += [
            Problem(
                where=f"--{name.replace('_', '-')}",
                found="it without --elastic",
                expected="it only with --elastic",
                remedy="Remove it, since it has no effect, or add --elastic.",
            )
            for name in _ONLY_ELASTIC
            if is_given(context, name)
        ]
    if problems:
        raise CommandError("the command cannot be run", problems)


def refuse_without_save(training: TrainingCommand) -> None:
    """Raise CommandError for a command that has nothing to go on from."""
    if training.resumes:
        return
    problem = Problem(
        where="--elastic",
        found="no --save in the training command",
        expected="checkpoints to go on from",
        remedy="Add --save DIR --save-interval N.",
    )
    raise CommandError("the command cannot be run", [problem])
