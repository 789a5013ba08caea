"""`zorse supervise`: what the batch script of `zorse launch --elastic` runs."""

import hashlib
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import CommandError, reported_errors
from zorse_megatron.cli.elastic_launch import ElasticJob
from zorse_megatron.cli.elastic_options import (
    DEFAULT_PLAN_LIMIT_S,
    DEFAULT_PLANS,
    ElasticOptions,
    Grow,
    MinGpus,
    PlanLimit,
    PlanOptions,
    PlansDirectory,
    plan_options_of,
)
from zorse_megatron.cli.launch_options import Partitions, Python, Sbatch, sbatch_options_of
from zorse_megatron.cli.options import ClusterFile, PlanFile
from zorse_megatron.errors import Problem
from zorse_megatron.files.write import write_text
from zorse_megatron.flags.scan import last_values
from zorse_megatron.launch.elastic.back_in_queue import (
    back_in_queue,
    cancel,
    requeues_of,
    restarts_of,
)
from zorse_megatron.launch.elastic.nodes_left import nodes_left, what_is_saved
from zorse_megatron.launch.elastic.replan import JobFiles, Replanner
from zorse_megatron.launch.elastic.saved import newest_saved
from zorse_megatron.launch.elastic.slurm_nodes import SlurmNodes, allocated, nodes_up
from zorse_megatron.launch.elastic.supervise import Limits, Outcome, Supervisor, Wish, Wishes
from zorse_megatron.log import say

MaxRestarts = Annotated[
    int, typer.Option(min=0, help="Failures in a row without a new checkpoint, and restarts.")
]
Grace = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="From a node's end to that of all ranks.")
]


def supervise(  # noqa: PLR0917
    context: typer.Context,
    path: PlanFile,
    cluster: ClusterFile,
    plans: PlansDirectory = DEFAULT_PLANS,
    min_gpus: MinGpus = 1,
    plan_options: PlanOptions = "",
    plan_limit: PlanLimit = DEFAULT_PLAN_LIMIT_S,
    grow: Grow = "restart",
    partition: Partitions = None,
    sbatch: Sbatch = None,
    python: Python = "python",
    max_restarts: MaxRestarts = 20,
    grace: Grace = 30.0,
) -> None:
    """Train inside a Slurm job, and go on with the nodes that are left when some are lost."""
    with reported_errors():
        environment = dict(os.environ)
        if "SLURM_JOB_ID" not in environment:
            raise CommandError("the command cannot be run", [_no_job()])
        elastic = ElasticOptions(
            plans=plans,
            min_gpus=min_gpus,
            plan_options=plan_options,
            plan_limit_s=plan_limit,
            grow=grow,
        )
        problems = list(elastic.problems())
        if problems:
            raise CommandError("the command cannot be run", problems)
        job = ElasticJob(
            plan=path,
            cluster=cluster,
            given=training_flags(context) or (),
            partitions=tuple(partition or ()),
            sbatch=tuple(sbatch or ()),
            python=python,
            elastic=elastic,
        )
        supervised = _Supervised(job, environment, Limits(max_failures=max_restarts, grace_s=grace))
        raise typer.Exit(supervised.run())


class _Supervised:
    """The supervisor of this Slurm job, and what becomes of the job afterwards."""

    def __init__(self, job: ElasticJob, environment: Mapping[str, str], limits: Limits) -> None:
        self.job, self.environment = job, environment
        self.cluster = job.whole()
        self.save = last_values(job.given, ["--save"]).get("--save")
        self.machines = SlurmNodes(
            cluster=self.cluster,
            training=job.given,
            environment=environment,
            python=job.python,
            srun_options=tuple(
                f"--{option}"
                for option in sbatch_options_of(job.sbatch)
                if option.startswith("cpus-per-task=")  # srun does not take it over from sbatch
            ),
        )
        self.replanner = Replanner(
            plan=job.plan,
            cluster=job.cluster,
            directory=job.elastic.plans,
            training=job.given,
            options=plan_options_of(job.elastic.plan_options),
            min_gpus=job.elastic.min_gpus,
            save=self.save,
            limit_s=job.elastic.plan_limit_s,
            python=job.python,
        )
        self.limits = limits
        self.wishes = Wishes(
            looks_for_nodes=self._more_nodes,
            look_every_s=float(environment.get("ZORSE_LOOK_EVERY_S", 60)),
            only_after_save=job.elastic.grow == "checkpoint",
        )

    def run(self) -> int:
        """Train; return the status of the batch script."""
        signal.signal(signal.SIGUSR1, self._stop)
        supervisor = Supervisor(
            machines=self.machines,
            replanner=self.replanner,
            limits=self.limits,
            wishes=self.wishes,
            log=self.job.elastic.plans / f"attempts-{self.machines.job}.jsonl",
        )
        signal.signal(signal.SIGTERM, _end)
        try:
            while True:
                outcome = supervisor.run()
                if outcome.wish is not Wish.GROW or not self._have_grown():
                    break
                self.wishes.should_grow = False
            return self._after(outcome)
        except _EndedBySlurm:
            return self._go_on_elsewhere()

    def _go_on_elsewhere(self) -> int:
        """Where Slurm has requeued the job because of a node, submit one without that node.

        Slurm would wait for it. It also sends TERM when a job is cancelled or preempted.
        """
        failed = 128 + signal.SIGTERM
        before = int(self.environment.get("SLURM_RESTART_COUNT") or 0)
        wanted = self._wanted()
        asked = {each.node.name for each in allocated(self.cluster, self.environment)}
        if requeues_of(self.machines.job, self.environment) <= before or asked <= wanted:
            return failed
        if not self._is_enough(wanted):
            left, saved = nodes_left(self.cluster, wanted), newest_saved(self.save)
            say(f"error: {len(left.ranks)} GPUs are left. {what_is_saved(saved)}")
            return failed
        if self._submitted(wanted, asked):
            cancel(self.machines.job, self.environment)
        return failed

    def _submitted(self, wanted: Collection[str], asked: Collection[str]) -> bool:
        return back_in_queue(
            self.machines.job,
            self.environment,
            asked=asked,
            wanted=self._in_order(wanted) if self._is_enough(wanted) else asked,
            write_script=self._write_script,
        )

    def _stop(self, number: int, frame: object) -> None:
        self.wishes.must_stop = True

    def _more_nodes(self, files: JobFiles) -> bool:
        if self.job.elastic.grow == "restart" or not files.left.lost:
            return False
        free = nodes_up(self.cluster, self.environment, idle=True)
        more = nodes_left(self.cluster, {*free, *files.left.names})
        return len(more.ranks) > len(files.left.ranks)

    def _have_grown(self) -> bool:
        """Whether the nodes that have come are this job's, which need not leave then."""
        wanted = self._wanted()
        return wanted <= self.machines.answering()

    def _wanted(self) -> frozenset[str]:
        """All nodes that the job could have, now or after a while in the queue."""
        up = nodes_up(self.cluster, self.environment, idle=False)
        return frozenset(nodes_left(self.cluster, up).names)

    def _after(self, outcome: Outcome) -> int:
        """Return the status, after the job has been sent back into the queue if it is to go on."""
        asked = [each.node.name for each in allocated(self.cluster, self.environment)]
        wanted = self._wanted()
        restarts = restarts_of(self.environment)
        if outcome.wish is None:
            # Too few nodes of this job: there may be others.
            more = outcome.needs_nodes and not wanted <= self.machines.answering()
            if not more or not self._is_enough(wanted) or restarts >= self.limits.max_failures:
                return outcome.status
        elif outcome.status == 2:
            return 2
        elif not outcome.has_saved and restarts >= self.limits.max_failures:
            say(f"error: stopped after {restarts} restarts before it has saved anything: it ends")
            return outcome.status or 1
        went = self._submitted(wanted, asked)
        if not went:
            say("error: Slurm does not take the job back, so it ends here and is not done")
            say("Submit it again: it goes on from its last checkpoint.")
        return outcome.status or 1  # after a save it is 0, and the job would seem COMPLETED

    def _is_enough(self, wanted: Collection[str]) -> bool:
        ranks = nodes_left(self.cluster, wanted).ranks
        return len(ranks) >= self.job.elastic.min_gpus

    def _in_order(self, wanted: Collection[str]) -> list[str]:
        return [node.name for node in self.cluster.nodes if node.name in wanted]

    def _write_script(self, nodes: Collection[str]) -> Path:
        key = hashlib.sha256(",".join(nodes).encode()).hexdigest()[:8]
        path = self.job.elastic.plans / f"job-{len(nodes)}-nodes-{key}.sh"
        title = f"Trains under a plan for {len(nodes)} of {len(self.cluster.nodes)} nodes."
        return write_text(path, self.job.script(nodes, title))


class _EndedBySlurm(BaseException):
    """Slurm wants this process to end."""


def _end(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _EndedBySlurm


def _no_job() -> Problem:
    return Problem(
        where="SLURM_JOB_ID",
        found="no Slurm job around this command",
        expected="the batch script of zorse launch --elastic, which runs it",
        remedy="Submit that with sbatch.",
    )
