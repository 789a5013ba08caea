"""`zorse join`: what jobs run that go on with the nodes that are left; and its options."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from zorse_megatron.cli.command_group import not_understood, training_flags
from zorse_megatron.cli.console import refusal, refuse, reported_errors
from zorse_megatron.cli.options import ClusterFile, PlanFile, with_bundles
from zorse_megatron.errors import Problem
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.flags.command import last_values
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.launch.elastic_ranks import (
    ERROR,
    LEAVES,
    Arrival,
    Rendezvous,
    answers_for,
    rendezvous,
    token_of,
)
from zorse_megatron.launch.rank_environment import LaunchedRank, launched_rank, node_called
from zorse_megatron.launch.replan import DEFAULT_LIMIT_S, Replanner, Starts
from zorse_megatron.launch.training_command import MODULE, TrainingCommand, training_of
from zorse_megatron.log import say
from zorse_megatron.processes import end_with_parent, free_port

_WEEK_S = 604_800
"""Longer than anybody waits; what sleeps and waits is given as seconds has to end somewhere."""
_NOT_AGAIN = (
    "--cluster",
    "--out",
    "--json",
    "--model",
    "--html",
    "--from-status",
    "--without",
    "--help",
    "-h",
    "--",
)
_ARRIVE_S = 180.0
"""From torchrun's start of all processes until each has imported this."""
_LIST_S = 60.0
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, kw_only=True)
class ElasticOptions:
    """What a job is to do when nodes are lost, as it is written into its script."""

    plans: Annotated[
        Path,
        typer.Option(
            "--plans",
            metavar="DIR",
            help="Directory for the cluster files and plans for fewer nodes, each searched once; "
            "all nodes must see it.",
        ),
    ] = Path("plans-for-fewer-nodes")
    min_gpus: Annotated[
        int, typer.Option(min=1, help="With fewer GPUs the job ends instead of going on.")
    ] = 1
    plan_options: Annotated[
        str,
        typer.Option(
            metavar="OPTIONS",
            help="Options of zorse plan for planning again, in quotes: "
            "--plan-options '--profile profile.json --max-tp 1'.",
        ),
    ] = ""
    plan_limit: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, max=_WEEK_S, help="How long planning again may take."
        ),
    ] = DEFAULT_LIMIT_S

    def problems(self) -> Iterator[Problem]:
        """Yield all that is wrong with them."""
        yield from self.plan_options_problems()
        yield from folder_problems("--plans", self.plans)

    def plan_options_problems(self) -> Iterator[Problem]:
        """Yield what cannot be given to `zorse plan` once more."""
        where = "--plan-options"
        try:
            words = shlex.split(self.plan_options)
        except ValueError as error:
            yield Problem(
                where=where,
                found=f"{self.plan_options!r} ({error})",
                expected="options, quoted as in a shell",
                remedy="Check the quotes.",
            )
            return
        given = [name for name in (word.partition("=")[0] for word in words) if name in _NOT_AGAIN]
        for name in given:
            yield Problem(
                where=where,
                found=f"{name} in it",
                expected="options that say how to search",
                remedy="Leave it out: files and training command are given where the job is.",
            )
        if not given:
            yield from _not_of_plan(where, words)

    def refuse_without_save(self, training: TrainingCommand) -> None:
        """Raise CommandError for a command that has nothing to go on from."""
        if not training.resumes:
            raise refusal(
                "--elastic",
                "no --save in the training command",
                "checkpoints to go on from",
                "Add --save DIR --save-interval N.",
            )

    def words(self) -> list[str]:
        """As options of a command."""
        more = ["--plan-options", self.plan_options] if self.plan_options else []
        return [
            *("--plans", str(self.plans), "--min-gpus", str(self.min_gpus), *more),
            *("--plan-limit", f"{self.plan_limit:g}"),
        ]


def _not_of_plan(where: str, words: Sequence[str]) -> Iterator[Problem]:
    """The first that `zorse plan` cannot read: it would fail when a node is lost."""
    from zorse_megatron.cli.main import app  # it imports this module

    plan = typer.main.get_command(app).commands["plan"]  # type: ignore[attr-defined]
    found = not_understood(plan, "plan", [*words, "--cluster", "cluster.yaml"])
    if found is not None:
        said, remedy = found
        yield Problem(where=where, found=said, expected="options of zorse plan", remedy=remedy)


@with_bundles
def join(
    *,
    context: typer.Context,
    path: PlanFile,
    cluster: ClusterFile,
    when_lost: ElasticOptions,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="MAX_RESTARTS",
            help="Failures in a row without a new checkpoint, at most.",
        ),
    ] = 20,
) -> None:
    """Train as a process of torchrun, under the plan for the nodes that torchrun has."""
    with reported_errors():
        refuse([*when_lost.plan_options_problems(), *_launcher_problems()])
        me = launched_rank(os.environ, socket.gethostname())
        given = training_flags(context) or ()
        save = last_values(given, ["--save"]).get("--save")
        replanner = Replanner(
            plan=path,
            cluster=cluster,
            directory=when_lost.plans,
            training=given,
            options=tuple(shlex.split(when_lost.plan_options)),
            min_gpus=when_lost.min_gpus,
            save=save,
            limit_s=when_lost.plan_limit,
        )
        starts = Starts(
            directory=when_lost.plans,
            run=os.environ.get("TORCHELASTIC_RUN_ID", "job"),
            save=save,
            max_failures=max_restarts,
        )
        _become(_answer(me, replanner, starts), given)


def _answer(me: LaunchedRank, replanner: Replanner, starts: Starts) -> Mapping[str, Any]:
    """What the first process says to this one, once all have arrived; ends it if it is to leave."""
    whole = load_cluster(replanner.cluster)
    node = node_called(whole, me.node)
    answer = rendezvous(
        Rendezvous(
            number=me.rank,
            size=me.world_size,
            address=me.master_address,
            port=me.master_port,
            token=token_of(starts.run, os.environ.get("ZORSE_TOKEN", "")),
            is_one_node=os.environ.get("LOCAL_WORLD_SIZE") == str(me.world_size),
        ),
        Arrival(
            node=me.node if node is None else node.name,
            local_rank=me.local_rank,
            free_port=free_port(),
            gpus=None if me.local_rank else _listed_gpus(),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        ),
        partial(
            answers_for,
            whole,
            replanner,
            starts,
            was_requeued=os.environ.get("SLURM_RESTART_COUNT", "0") != "0",
        ),
        arrive_s=_ARRIVE_S,
        decide_s=replanner.limit_s,
    )
    _leave_where_told(answer, me)
    return answer


def _leave_where_told(answer: Mapping[str, Any], me: LaunchedRank) -> None:
    """End this process where there is nothing to train."""
    if ERROR not in answer:
        return
    leaves = bool(answer[LEAVES]) and me.local_rank == 0
    if me.rank == 0 or leaves:
        say(f"error: {answer[ERROR]}")
        sys.stdout.flush()  # before torchrun ends this process
    if leaves:
        os.kill(os.getppid(), signal.SIGTERM)
    raise typer.Exit(1)


def _become(answer: Mapping[str, Any], given: Sequence[str]) -> None:
    """Go on as this rank, in this process, which is torchrun's to watch and to end."""
    training = training_of(given, plan=answer["plan"], cluster=answer["cluster"])
    environment = {**os.environ, **answer["variables"]}
    without = f", without {', '.join(answer['without'])}" if answer["without"] else ""
    planned = "searched for now" if answer["is_new"] else "as before"
    say(f"{environment['WORLD_SIZE']} GPUs{without}: plan {answer['plan']} ({planned})")
    sys.stdout.flush()
    end_with_parent()  # else ranks of an agent that is killed would train on beside new ones
    os.execve(sys.executable, [sys.executable, "-m", MODULE, *training.words], environment)


def _listed_gpus() -> int | None:
    """As many as the driver lists, which one that has fallen off its bus is not among; or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], check=False, capture_output=True, text=True, timeout=_LIST_S
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU") for line in done.stdout.splitlines())


def _launcher_problems() -> list[Problem]:
    """Where this is not a process of torchrun's, with a rendezvous as it has to be."""
    found = os.environ.get(_AGENTS_STORE)
    if found == "False" and "RANK" in os.environ:
        return []
    return [
        Problem(
            where=_AGENTS_STORE,
            found="nothing" if found is None else found,
            expected="False, as torchrun sets it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
            remedy="Use the commands or the batch script of zorse launch --elastic.",
        )
    ]
