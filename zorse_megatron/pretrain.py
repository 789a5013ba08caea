"""Trains a Megatron model under a plan: `python -m zorse_megatron.pretrain`.

    torchrun --nproc-per-node 5 -m zorse_megatron.pretrain [SCRIPT.py] MEGATRON_FLAGS \\
        --zorse-plan plan.json

SCRIPT.py is the user's own, unmodified training script, for instance upstream's pretrain_gpt.py;
without it, an equal GPT entry of ours runs on the installed megatron.training. Without
`--zorse-plan` everything is stock. On a machine without a GPU, all of it runs on CPU over gloo.

srun takes the place of torchrun, with one task for each rank. `--zorse-cluster cluster.yaml` says
which node each rank is to be on; tasks of srun take their rank from it.

`--zorse-trace DIR` writes what each rank executed, and when; `--zorse-memory DIR` what its memory
held, by category. `--zorse-memory-limit GB` stops a rank that holds more, and
`--zorse-host-memory-limit GB` says what all ranks of a node together may keep in host memory.
`--zorse-damaged-checkpoint skip` goes on from an older checkpoint where the latest is not whole.
`--zorse-metrics FILE` appends one line of JSON per iteration, with loss and gradient norm in full
precision; it needs no plan.

Under a plan, the process that is started forks the rank and watches it: a rank that dies is named,
and ends the job (see `zorse_megatron.watch`). `--zorse-silence-limit SECONDS` says for how long a
node may be silent, by default 15.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zorse_megatron.errors import FlagError, Problem, ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.flags.scan import split_ours, split_script
from zorse_megatron.launch.cluster_ranks import node_called, torch_environment
from zorse_megatron.launch.rank_environment import launched_rank, node_name
from zorse_megatron.log import complain
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.watch.processes.root_cause import LEAST_SILENCE_S, Limits
from zorse_megatron.watch.processes.watched_rank import BAD_INPUT, WatchedRank

if TYPE_CHECKING:
    import torch

    from zorse_megatron.runtime.host_link import HostLink

_NEED_PLAN = (
    "--zorse-cluster",
    "--zorse-trace",
    "--zorse-memory",
    "--zorse-memory-limit",
    "--zorse-host-memory-limit",
    "--zorse-update",
    "--zorse-damaged-checkpoint",
    "--zorse-silence-limit",
)
_UPDATES: tuple[Literal["auto", "stock", "fused"], ...] = ("auto", "stock", "fused")
_STOP, _SKIP = "stop", "skip"


@dataclass(frozen=True, kw_only=True)
class PretrainCommand:
    """The command line, split into ours and Megatron's."""

    script: Path | None
    plan: Path | None
    cluster: Path | None
    trace: Path | None
    metrics: Path | None
    memory: Path | None
    memory_limit_bytes: int | None
    host_memory_limit_bytes: int | None
    update: Literal["auto", "stock", "fused"]
    skips_damaged: bool
    limits: Limits
    megatron: tuple[str, ...]


def split_command(argv: Sequence[str]) -> PretrainCommand:
    """Split the arguments after the module name. Raises FlagError for a flag without value."""
    name, words = split_script(argv)
    script = None if name is None else Path(name)
    found, megatron = split_ours(words)
    ours: dict[str, str | None] = dict.fromkeys(("--zorse-plan", "--zorse-metrics", *_NEED_PLAN))
    problems = []
    for given in found:
        if given.flag not in ours:
            problems.append(_unknown_flag(given.flag, ours))
        elif not given.values:
            problems.append(_no_value(given.flag))
        elif ours[given.flag] is not None:
            problems.append(_given_twice(given.flag))
        else:
            ours[given.flag] = given.values[0]
    if script is not None and not script.is_file():
        problems.append(_no_script(script))
    problems += [
        _needs_plan(flag)
        for flag in _NEED_PLAN
        if ours[flag] is not None and ours["--zorse-plan"] is None
    ]
    limit_bytes, host_limit_bytes = (
        _limit_bytes(flag, ours[flag], problems)
        for flag in ("--zorse-memory-limit", "--zorse-host-memory-limit")
    )
    update = _update(ours["--zorse-update"], problems)
    skips_damaged = _skips(ours["--zorse-damaged-checkpoint"], problems)
    limits = _limits(ours["--zorse-silence-limit"], problems)
    if problems:
        raise FlagError("The command cannot be used", problems)
    paths = {flag: None if text is None else Path(text) for flag, text in ours.items()}
    return PretrainCommand(
        script=script,
        plan=paths["--zorse-plan"],
        cluster=paths["--zorse-cluster"],
        trace=paths["--zorse-trace"],
        metrics=paths["--zorse-metrics"],
        memory=paths["--zorse-memory"],
        memory_limit_bytes=limit_bytes,
        host_memory_limit_bytes=host_limit_bytes,
        update=update,
        skips_damaged=skips_damaged,
        limits=limits,
        megatron=megatron,
    )


def _limit_bytes(flag: str, text: str | None, problems: list[Problem]) -> int | None:
    """Read a number of gigabytes; notes a problem with anything else."""
    if text is None:
        return None
    try:
        limit_bytes = float(text) * 1e9
    except ValueError:
        limit_bytes = 0.0
    if 1 <= limit_bytes < float("inf"):
        return int(limit_bytes)
    problems.append(
        Problem(
            where=flag,
            found=f"{text!r}",
            expected="a number of gigabytes (10^9 bytes), more than 0",
            remedy=f"Write, for example, {flag} 14.5.",
        )
    )
    return None


def _update(text: str | None, problems: list[Problem]) -> Literal["auto", "stock", "fused"]:
    """Read how shards are updated; notes a problem with anything else."""
    for known in _UPDATES:
        if text in (None, known):
            return known
    problems.append(
        Problem(
            where="--zorse-update",
            found=f"{text!r}",
            expected=f"one of {', '.join(_UPDATES)}",
            remedy="Leave it out to let the job choose; it says what it chose.",
        )
    )
    return "auto"


def _skips(text: str | None, problems: list[Problem]) -> bool:
    """Read what a damaged checkpoint leads to; notes a problem with anything else."""
    if text not in (None, _STOP, _SKIP):
        problems.append(
            Problem(
                where="--zorse-damaged-checkpoint",
                found=f"{text!r}",
                expected=f"{_STOP} or {_SKIP}",
                remedy=f"{_SKIP} goes on from the newest checkpoint that is whole; without it, the "
                "job stops and says which one that is.",
            )
        )
    return text == _SKIP


def _limits(text: str | None, problems: list[Problem]) -> Limits:
    """Read a number of seconds; notes a problem with anything else."""
    if text is None:
        return Limits()
    try:
        silence_s = float(text)
    except ValueError:
        silence_s = 0.0
    if not LEAST_SILENCE_S <= silence_s < float("inf"):
        problems.append(
            Problem(
                where="--zorse-silence-limit",
                found=f"{text!r}",
                expected=f"a number of seconds, at least {LEAST_SILENCE_S:g}",
                remedy="Leave it out for 15; torchrun and the batch script wait for 30 and 60.",
            )
        )
        return Limits()
    return Limits(silence_s=silence_s)


def _unknown_flag(flag: str, ours: dict[str, str | None]) -> Problem:
    return Problem(
        where=flag,
        found="an unknown flag",
        expected=f"one of {', '.join(ours)}",
        remedy="Check the spelling.",
    )


def _needs_plan(flag: str) -> Problem:
    return Problem(
        where=flag,
        found="no --zorse-plan",
        expected="a plan, which the flag is about",
        remedy=f"Add --zorse-plan PATH, or leave {flag} out.",
    )


def _given_twice(flag: str) -> Problem:
    return Problem(
        where=flag, found="it given twice", expected="it once", remedy="Leave one of them out."
    )


def _no_value(flag: str) -> Problem:
    return Problem(where=flag, found="no value", expected="one", remedy=f"Write {flag} VALUE.")


def _no_script(script: Path) -> Problem:
    return Problem(
        where=str(script),
        found="no such file",
        expected="your training script, e.g. pretrain_gpt.py",
        remedy="Correct the path, or leave it out to run the built-in GPT entry.",
    )


def run(
    argv: Sequence[str], *, make_host_link: "Callable[[torch.device], HostLink] | None" = None
) -> None:
    """Run the command. Raises ZorseError before anything is lost if its input cannot be used."""
    environment = dict(os.environ)
    launched = None if "RANK" in environment else launched_rank(environment, socket.gethostname())
    if launched is not None:  # before anything can go wrong, so that not every rank complains
        os.environ.update(torch_environment(launched, environment, None))
    command = split_command(argv)
    plan = cluster = None
    if command.cluster is not None:
        from zorse_megatron.schema.cluster.cluster_yaml import load_cluster

        cluster = load_cluster(command.cluster)
        if launched is not None:
            os.environ.update(torch_environment(launched, environment, cluster))
    if command.plan is not None:
        # Plan and flags are checked before torch and Megatron are imported: bad input fails in a
        # second.
        from zorse_megatron.flags.command import read_command
        from zorse_megatron.flags.command_findings import refuse_misfit
        from zorse_megatron.schedules.refusals import refuse_unsupported
        from zorse_megatron.schema.cluster.rank_placement import refuse_other_cluster
        from zorse_megatron.schema.plan.plan_json import load_plan

        plan = load_plan(command.plan)
        refuse_unsupported(plan, str(command.plan))
        if cluster is not None:
            refuse_other_cluster(plan, cluster, str(command.plan))
        script = [str(command.script)] if command.script else []
        training = read_command([*script, *command.megatron])
        refuse_misfit(
            training,
            plan,
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            kinds=None if cluster is None else cluster.kinds,
        )
    refuse_without("train", what="training")
    if plan is None:
        watch, hub_address = WatchedRank(None, command.limits), ""
    else:
        exit_s = 60.0 * training.args.distributed_timeout_minutes
        watch, hub_address = _watched(
            plan, replace(command.limits, exit_s=exit_s), _own_node(cluster)
        )
    with watch.last_words():
        _train(command, plan, cluster, watch, hub_address, make_host_link=make_host_link)


def _watched(plan: Plan, limits: Limits, node: str) -> tuple[WatchedRank, str]:
    """Let a child of this process be the rank; in a job that cannot be the plan's, none."""
    from zorse_megatron.schema.plan.rank_names import rank_name
    from zorse_megatron.watch.start import watched

    if os.environ.get("WORLD_SIZE") != str(plan.world_size):
        return WatchedRank(None, limits), ""
    return watched(
        os.environ, describe=lambda rank: rank_name(plan, rank), host=node, limits=limits
    )


def _train(
    command: PretrainCommand,
    plan: Plan | None,
    cluster: Cluster | None,
    watch: WatchedRank,
    hub: str,
    *,
    make_host_link: "Callable[[torch.device], HostLink] | None",
) -> None:
    """Put the plan into effect and run the script. `hub`: on rank 0, see `watch.start`."""
    from zorse_megatron.adapter.cpu import cpu_mode
    from zorse_megatron.watch.hub_address import exchange

    store = exchange(watch, hub)
    megatron_flags = list(command.megatron)
    if cpu_mode.needed():
        cpu_mode.enable()
        megatron_flags = cpu_mode.with_cpu_flags(megatron_flags)
    from zorse_megatron.adapter.activate import PlanRun, activate

    plan_run = None
    if plan is not None:
        plan_run = PlanRun(
            plan=plan,
            node=_own_node(cluster),
            cluster=cluster,
            trace_directory=command.trace,
            memory_directory=command.memory,
            metrics=command.metrics,
            memory_limit_bytes=command.memory_limit_bytes,
            host_memory_limit_bytes=command.host_memory_limit_bytes,
            update=command.update,
            skips_damaged=command.skips_damaged,
            enter=watch.enter,
            make_host_link=make_host_link,
        )
    activate(plan_run)
    if command.metrics is not None:
        from zorse_megatron.adapter.patches.registry import REGISTRY
        from zorse_megatron.adapter.recording.metrics import metrics_hooks
        from zorse_megatron.adapter.recording.record_files import RecordFiles, check_hooks

        REGISTRY.apply(metrics_hooks(command.metrics))
        if plan_run is None:
            REGISTRY.apply(check_hooks(RecordFiles(metrics=command.metrics)))
    from zorse_megatron.adapter.entry import run_entry

    run_entry(command.script, megatron_flags)
    del store  # until here, for the ranks that still read from it


def _own_node(cluster: Cluster | None) -> str:
    """Name of this node, as the cluster file spells it if it has it."""
    name = node_name(os.environ, socket.gethostname())
    node = None if cluster is None else node_called(cluster, name)
    return name if node is None else node.name


def main(
    argv: Sequence[str] | None = None,
    *,
    make_host_link: "Callable[[torch.device], HostLink] | None" = None,
) -> None:
    """Entry point; exits with status 2 and all problems on bad input.

    `argv` (default: the process's own) starts with the script, if there is one. The patch to
    upstream's pretrain_gpt.py calls this from inside the script, which then runs a second time,
    without our flags (see patches/). `make_host_link`: gets the rank's device, returns its link to
    host memory; for ranks that stand for others, such as emulated ones.
    """
    try:
        run(sys.argv[1:] if argv is None else argv, make_host_link=make_host_link)
    except ZorseError as error:
        complain(str(error), everywhere=error.is_of_one_rank)
        sys.exit(BAD_INPUT)


if __name__ == "__mp_main__":
    # A process that Megatron has spawned to save with. Slurm may send TERM to all processes of a
    # job: it is for the ranks, which save then (`--exit-signal-handler`) and need their helpers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if __name__ == "__main__":
    main()
