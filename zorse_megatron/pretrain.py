r"""Trains a Megatron model under a plan: `python -m zorse_megatron.pretrain`.

    torchrun --nproc-per-node 5 -m zorse_megatron.pretrain [SCRIPT.py] MEGATRON_FLAGS \
        --zorse-plan plan.json

SCRIPT.py is the user's own, unmodified training script, for instance upstream's pretrain_gpt.py;
without it, an equal GPT entry of ours runs on the installed megatron.training. Without
`--zorse-plan` everything is stock. On a machine without a GPU, all of it runs on CPU over gloo.

srun takes the place of torchrun, with one task for each rank. `--zorse-cluster cluster.yaml` says
which node each rank is to be on; tasks of srun take their rank from it.

`--zorse-trace DIR` writes what each rank executed, and when; `--zorse-memory DIR` what its memory
held, by category. `--zorse-memory-limit GB` stops a rank that holds more, and
`--zorse-host-memory-limit GB` says what all ranks of a node together may keep in host memory.
`--zorse-damaged-checkpoint skip` resumes from an older checkpoint if the latest is damaged.
`--zorse-rebalance on` lets the counts of micro-batches follow what the ranks take for them.
`--zorse-status DIR` keeps a file there for `zorse status`: who is slow, since when, tokens/s.
`--zorse-metrics FILE` appends a line of JSON per iteration, in full precision; it needs no plan.

Under a plan, the process that is started forks the rank and watches it: a rank that dies is named,
and ends the job (see `zorse_megatron.live.start_watch`), as does a node silent for
`--zorse-silence-limit`.
"""

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from zorse_megatron.adapter.plan_run import PlanRun, RankSetup
from zorse_megatron.errors import FlagError, ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.launch.pretrain_command import PretrainCommand, split_command
from zorse_megatron.launch.rank_environment import (
    OUTCOME,
    LaunchedRank,
    launched_rank,
    node_called,
    node_name,
    note_outcome,
    queue_environment,
    share_gpus,
    torch_environment,
)
from zorse_megatron.live.root_cause import Timeouts
from zorse_megatron.live.watched_rank import BAD_INPUT, WatchedRank
from zorse_megatron.log import complain
from zorse_megatron.plan.plan import Plan

_MEETING_S = 30.0
"""Between the ranks of an elastic job: they start at one time, and import the same."""


def run(argv: Sequence[str], *, setup: RankSetup | None = None) -> None:
    """Run the command. Raises ZorseError before anything is lost if its input cannot be used."""
    environment = dict(os.environ)
    launched = None if "RANK" in environment else launched_rank(environment, socket.gethostname())
    if launched is not None:  # before anything can go wrong, so that not every rank complains
        os.environ.update(torch_environment(launched, environment, None))
    share_gpus(os.environ)
    try:
        command = split_command(argv)
        cluster = _cluster_of(command, launched, environment)
        checked = None
        if command.plan is not None:
            from zorse_megatron.plan.plan_file import load_plan

            load = partial(load_plan, command.plan)
            checked = _checked(command, load, str(command.plan), cluster)
        refuse_without("train", what="training")
    except ZorseError as error:
        _tell_other_nodes(error, argv)
        raise
    watch, hub_address = WatchedRank(None, command.timeouts), ""
    if checked is not None:
        os.environ.update(queue_environment(os.environ))
        timeouts = replace(command.timeouts, exit_s=checked.timeout_s)
        if OUTCOME in os.environ:  # of an elastic job, whose processes have met already
            timeouts = replace(timeouts, meeting_s=_MEETING_S)
        saved = partial(_what_is_saved, command.megatron)
        watch, hub_address = _watched(checked.plan, timeouts, _own_node(cluster), saved)
    with watch.last_words():
        _train(command, checked, cluster, watch, hub_address, setup=setup)


def _cluster_of(
    command: PretrainCommand, launched: LaunchedRank | None, environment: Mapping[str, str]
) -> Cluster | None:
    """The cluster file, which may name another interface for the ranks to meet."""
    if command.cluster is None:
        return None
    from zorse_megatron.inputs.cluster_yaml import load_cluster

    cluster = load_cluster(command.cluster)
    if launched is not None:
        os.environ.update(torch_environment(launched, environment, cluster))
    return cluster


def _tell_other_nodes(error: ZorseError, argv: Sequence[str]) -> None:
    """Where other nodes may have found nothing wrong, let them not wait for this one.

    A job on one node ends at once: all its ranks read the same files. Without a plan nobody would
    hear it.
    """
    from zorse_megatron.live.start_watch import watched

    has_plan = any(word.partition("=")[0] == "--zorse-plan" for word in argv)
    if not has_plan or os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        return
    watch, _ = watched(os.environ, describe=lambda rank: f"rank {rank}", host=_own_node(None))
    with watch.last_words(is_early=True):
        raise error


@dataclass(frozen=True, kw_only=True)
class _CheckedPlan:
    """A plan that the command's flags fit."""

    plan: Plan
    dtypes: tuple[ComputeDtype, ...]
    """Rank -> what it computes in."""
    timeout_s: float
    """For how long ranks wait for one another."""


def _checked(
    command: PretrainCommand, load: Callable[[], Plan], source: str, cluster: Cluster | None
) -> _CheckedPlan:
    """Compare a plan with the command, before torch is imported. `source`: what it is called."""
    from zorse_megatron.flags.check import check_command, naming_flags_too
    from zorse_megatron.flags.command import read_command
    from zorse_megatron.flags.model_in_flags import compute_dtypes, job_dtype
    from zorse_megatron.inputs.rank_placement import refuse_other_cluster
    from zorse_megatron.schedule.lower import refuse_unsupported

    words = [*([str(command.script)] if command.script else []), *command.megatron]
    training = read_command(words)
    training.args.zorse_lora = command.options.lora
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    with naming_flags_too(training, world_size=world_size):
        plan = load()
        refuse_unsupported(plan, source)
        if cluster is not None:
            refuse_other_cluster(plan, cluster, source)
    kinds = None if cluster is None else cluster.kinds
    if misfits := check_command(training, plan, kinds, world_size=world_size):
        raise FlagError("The command does not fit the plan", misfits)
    of_group = compute_dtypes(plan, job_dtype(training.args))
    return _CheckedPlan(
        plan=plan,
        dtypes=tuple(of_group[plan.group_of_rank(rank)] for rank in range(plan.world_size)),
        timeout_s=60.0 * training.args.distributed_timeout_minutes,
    )


def _what_is_saved(flags: Sequence[str]) -> str:
    from zorse_megatron.flags.command import last_values
    from zorse_megatron.live.checkpoint_choice import newest_saved, what_is_saved

    return what_is_saved(newest_saved(last_values(flags, ["--save"]).get("--save")))


def _watched(
    plan: Plan, timeouts: Timeouts, node: str, saved: Callable[[], str]
) -> tuple[WatchedRank, str]:
    """Let a child of this process be the rank; in a job that cannot be the plan's, none."""
    from zorse_megatron.live.start_watch import watched
    from zorse_megatron.plan.spans import rank_name

    if os.environ.get("WORLD_SIZE") != str(plan.world_size):
        return WatchedRank(None, timeouts), ""
    return watched(
        os.environ,
        describe=lambda rank: rank_name(plan, rank),
        host=node,
        timeouts=timeouts,
        saved=saved,
    )


def _train(
    command: PretrainCommand,
    checked: _CheckedPlan | None,
    cluster: Cluster | None,
    watch: WatchedRank,
    hub: str,
    *,
    setup: RankSetup | None,
) -> None:
    """Put the plan into effect and run the script. `hub`: on rank 0, see `live.start_watch`."""
    from zorse_megatron.adapter import cpu_mode
    from zorse_megatron.adapter.start_checks import checked_gpu_flags, take_gpu
    from zorse_megatron.flags.installed_software import with_cpu_flags
    from zorse_megatron.live.hub_address import exchange

    plan, dtypes = (None, ()) if checked is None else (checked.plan, checked.dtypes)
    store = exchange(watch, hub)
    megatron_flags = checked_gpu_flags(
        command.megatron, node=_own_node(cluster), store=store, dtypes=dtypes
    )
    if cpu_mode.needed():
        cpu_mode.enable()
        megatron_flags = with_cpu_flags(megatron_flags, has_plan=plan is not None)
    if setup is not None:
        take_gpu()
        setup.init_process_group()
    from zorse_megatron.adapter.start import run_entry, run_plans

    @cache
    def record_metrics() -> None:
        from zorse_megatron.adapter.patches.rebind import REGISTRY
        from zorse_megatron.adapter.recording import recording_hooks

        REGISTRY.apply(recording_hooks(command.options, under_plan=plan is not None))

    def enter_script() -> None:
        record_metrics()
        run_entry(command.script, megatron_flags)

    run = None if plan is None else _plan_run(command, plan, cluster, watch, setup)
    run_plans(run, enter_script)
    del store  # until here, for the ranks that still read from it


def _plan_run(
    command: PretrainCommand,
    plan: Plan,
    cluster: Cluster | None,
    watch: WatchedRank,
    setup: RankSetup | None,
) -> PlanRun:
    return PlanRun(
        plan=plan,
        options=command.options,
        node=_own_node(cluster),
        cluster=cluster,
        enter=watch.enter,
        setup=setup,
        elastic_run=os.environ.get("TORCHELASTIC_RUN_ID", "") if OUTCOME in os.environ else "",
        check_next=None
        if setup is not None
        else lambda plan: _checked(command, lambda: plan, "the next plan", cluster).dtypes,
    )


def _own_node(cluster: Cluster | None) -> str:
    """Name of this node, as the cluster file spells it if it has it."""
    name = node_name(os.environ, socket.gethostname())
    node = None if cluster is None else node_called(cluster, name)
    return name if node is None else node.name


def main(argv: Sequence[str] | None = None, *, setup: RankSetup | None = None) -> None:
    """Entry point; exits with status 2 and all problems on bad input.

    `argv` (default: the process's own) starts with the script, if there is one. The patch to
    upstream's pretrain_gpt.py calls this from inside the script, which then runs a second time,
    without our flags (see patches/).
    """
    try:
        run(sys.argv[1:] if argv is None else argv, setup=setup)
    except ZorseError as error:
        complain(str(error), everywhere=error.is_of_one_rank)
        note_outcome(os.environ, BAD_INPUT)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        sys.excepthook = lambda *_: None  # no traceback on every rank of what somebody wanted
        raise
    except Exception as error:
        # Python keeps an error that it shows to its end. Data loaders in the error's frames would
        # keep their workers, which do not end by SIGTERM (`--exit-signal-handler`), and are waited
        # for.
        traceback.clear_frames(error.__traceback__)
        raise
    note_outcome(os.environ, 0)


if __name__ == "__mp_main__":
    # A process that Megatron has spawned to save with. Slurm may send TERM to all processes of a
    # job: it is for the ranks, which save then (`--exit-signal-handler`) and need their helpers.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

if __name__ == "__main__":
    main()
