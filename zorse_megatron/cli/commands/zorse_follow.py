"""`zorse follow`: move a run to another plan when what its GPUs take has changed for good."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import CommandError, reported_errors
from zorse_megatron.cli.elastic_options import (
    WEEK_S,
    PlanOptions,
    plan_options_of,
    plan_options_problems,
)
from zorse_megatron.cli.follow_loop import FollowLoop
from zorse_megatron.cli.following import FollowedRun, RunCosts, Search
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    AsJson,
    ClusterFile,
    Profiles,
    checked_share,
)
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.flags.scan import last_values
from zorse_megatron.follow.follower import Follower, Settings
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, parse_cluster
from zorse_megatron.schema.profile.profile_json import load_profile
from zorse_megatron.schema.text.strict import read_file

Gain = Annotated[float, typer.Option(help="Move for more than this share of an iteration's time.")]
Every = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0.1, max=WEEK_S, help="How often to look at the status."),
]
Patience = Annotated[
    int, typer.Option(min=3, help="Iterations for which a GPU's new speed has to have lasted.")
]
Horizon = Annotated[
    int,
    typer.Option(
        min=1, help="Iterations in which a move has to pay; fewer where the training ends before."
    ),
]
Rebuild = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0, max=WEEK_S, help="How long a run takes to build another plan."
    ),
]
SearchLimit = Annotated[
    float,
    typer.Option("--plan-limit", metavar="SECONDS", min=1, max=WEEK_S, help="Longest search."),
]
Nice = Annotated[int, typer.Option(min=0, max=19, help="Priority of the search, as in nice -n.")]
Files = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Directory for corrected files, plans and the log. Default: DIR/follow."
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Look once, decide, and end.")]


def follow(  # noqa: PLR0917
    context: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What the run has as --zorse-status.")
    ],
    cluster: ClusterFile,
    profile: Profiles = None,
    gain: Gain = 0.05,
    every: Every = 10.0,
    patience: Patience = 10,
    horizon: Horizon = 1000,
    rebuild: Rebuild = 60.0,
    plan_options: PlanOptions = "",
    plan_limit: SearchLimit = 600.0,
    nice: Nice = 19,
    files: Files = None,
    once: Once = False,
    as_json: AsJson = False,
) -> None:
    """Move a run to another plan when a GPU has become slower, or faster again, for good."""
    with reported_errors(as_json=as_json):
        gain = checked_share(gain, "--gain")
        given = training_flags(context) or ()
        kept = files or directory / "follow"
        problems = [*_option_problems(plan_options), *_problems(given)]
        problems += [*folder_problems("--files", kept), *_profile_problems(profile or ())]
        if problems:
            raise CommandError("the command cannot be run", problems)
        data = read_file(cluster, CLUSTER_FILE)
        there = parse_cluster(data, source=str(cluster))
        costs = RunCosts(
            cluster_data=data,
            cluster=there,
            profiles=tuple(profile or ()),
            workload=workload_of(model=None, flags=given),
            search=Search(
                training=given,
                options=plan_options_of(plan_options),
                limit_s=plan_limit,
                nice=nice,
                directory=kept,
            ),
            margin=DEFAULT_MARGIN,
            rebuild_s=rebuild,
        )
        iterations = last_values(given, ["--train-iters"]).get("--train-iters")
        last = int(iterations) if iterations and iterations.isdigit() else None
        follower = Follower(
            Settings(gain=gain, patience=patience, horizon=horizon, last_iteration=last),
            costs,
            FollowedRun(directory=directory),
        )
        loop = FollowLoop(
            follower=follower,
            directory=directory,
            cluster=there,
            source=cluster,
            log=kept / "decisions.jsonl",
            as_json=as_json,
        )
        if once:
            loop.look()
        else:
            loop.follow(every)


def _option_problems(text: str) -> Iterator[Problem]:
    problems = list(plan_options_problems(text))
    yield from problems
    if not problems and any(word.startswith("--profile") for word in plan_options_of(text)):
        yield Problem(
            where="--plan-options",
            found="--profile in it",
            expected="zorse follow to give the search its corrected one",
            remedy="Give the profile as an option of zorse follow.",
        )


def _profile_problems(paths: Iterable[Path]) -> Iterator[Problem]:
    """What the first search would find, hours later."""
    for path in paths:
        try:
            load_profile(path)
        except ZorseError as error:
            yield from error.problems


def _problems(given: tuple[str, ...]) -> list[Problem]:
    if given:
        return []
    return [
        Problem(
            where="--",
            found="no training command",
            expected="one after --, as in zorse launch",
            remedy="Such as: -- pretrain_gpt.py --num-layers 32",
        )
    ]
