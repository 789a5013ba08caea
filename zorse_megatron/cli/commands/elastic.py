"""`zorse supervise` and `zorse join`: what jobs run that go on with the nodes that are left."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from zorse_megatron.cli.command_group import training_flags
from zorse_megatron.cli.console import CommandError, reported_errors
from zorse_megatron.cli.elastic_options import (
    DEFAULT_PLAN_LIMIT_S,
    DEFAULT_PLANS,
    MinGpus,
    PlanLimit,
    PlanOptions,
    PlansDirectory,
    plan_options_of,
    plan_options_problems,
)
from zorse_megatron.cli.options import ClusterFile, PlanFile
from zorse_megatron.errors import Problem
from zorse_megatron.flags.command import last_values
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.launch.elastic.replan import Replanner, Starts
from zorse_megatron.launch.elastic.torchrun_ranks import (
    ERROR,
    LEAVES,
    Arrival,
    Rendezvous,
    answers_for,
    rendezvous,
)
from zorse_megatron.launch.rank_environment import LaunchedRank, launched_rank, node_called
from zorse_megatron.launch.training_command import MODULE, training_of
from zorse_megatron.log import say
from zorse_megatron.processes import end_with_parent, free_port

_ARRIVE_S = 180.0
"""From torchrun's start of all processes until each has imported this."""
_LIST_S = 60.0
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0, envvar="MAX_RESTARTS", help="Failures in a row without a new checkpoint, at most."
    ),
]
_AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def join(  # noqa: PLR0917
    context: typer.Context,
    path: PlanFile,
    cluster: ClusterFile,
    plans: PlansDirectory = DEFAULT_PLANS,
    min_gpus: MinGpus = 1,
    plan_options: PlanOptions = "",
    plan_limit: PlanLimit = DEFAULT_PLAN_LIMIT_S,
    max_restarts: MaxRestarts = 20,
) -> None:
    """Train as a process of torchrun, under the plan for the nodes that torchrun has."""
    with reported_errors():
        problems = [*plan_options_problems(plan_options), *_launcher_problems()]
        if problems:
            raise CommandError("the command cannot be run", problems)
        me = launched_rank(os.environ, socket.gethostname())
        whole = load_cluster(cluster)
        node = node_called(whole, me.node)
        given = training_flags(context) or ()
        save = last_values(given, ["--save"]).get("--save")
        run = os.environ.get("TORCHELASTIC_RUN_ID", "job")
        replanner = Replanner(
            plan=path,
            cluster=cluster,
            directory=plans,
            training=given,
            options=plan_options_of(plan_options),
            min_gpus=min_gpus,
            save=save,
            limit_s=plan_limit,
        )
        starts = Starts(directory=plans, run=run, save=save, max_failures=max_restarts)
        answer = rendezvous(
            Rendezvous(
                number=me.rank, size=me.world_size, address=me.master_address, port=me.master_port
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
            decide_s=plan_limit,
        )
        _become(_Rank.of(answer, me), given)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What the first process has said."""

    variables: dict[str, str]
    plan: str
    cluster: str
    told: str

    @classmethod
    def of(cls, answer: "object", me: LaunchedRank) -> "_Rank":
        """Read an answer; ends this process where there is nothing to train."""
        assert isinstance(answer, dict)
        if ERROR in answer:
            leaves = bool(answer[LEAVES]) and me.local_rank == 0
            if me.rank == 0 or leaves:
                say(f"error: {answer[ERROR]}")
                sys.stdout.flush()  # before torchrun ends this process
            if leaves:
                os.kill(os.getppid(), signal.SIGTERM)
            raise typer.Exit(1)
        variables = {str(key): str(value) for key, value in answer["variables"].items()}
        without = f", without {', '.join(answer['without'])}" if answer["without"] else ""
        planned = "searched for now" if answer["is_new"] else "as before"
        told = f"{variables['WORLD_SIZE']} GPUs{without}: plan {answer['plan']} ({planned})"
        return cls(variables=variables, plan=answer["plan"], cluster=answer["cluster"], told=told)


def _become(rank: _Rank, given: Sequence[str]) -> None:
    """Go on as this rank, in this process, which is torchrun's to watch and to end."""
    training = training_of(given, plan=rank.plan, cluster=rank.cluster)
    environment = {**os.environ, **rank.variables}
    say(rank.told)
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
