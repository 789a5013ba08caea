"""`zorse launch` and `zorse replan`: start a plan's ranks, also on the nodes that are left."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from zorse_megatron.cli.command_group import training_flags
from zorse_megatron.cli.console import print_json, print_plain, reported_errors
from zorse_megatron.cli.elastic_options import (
    DEFAULT_PLAN_LIMIT_S,
    DEFAULT_PLANS,
    Elastic,
    ElasticOptions,
    MinGpus,
    PlanLimit,
    PlanOptions,
    PlansDirectory,
    refuse_odd_elastic,
    refuse_without_save,
)
from zorse_megatron.cli.launched_job import (
    Force,
    LaunchedJob,
    MasterAddr,
    MasterPort,
    NodeNames,
    Partitions,
    Python,
    Sbatch,
    Slurm,
    Stock,
    Torchrun,
    partitions_of,
    planned_job,
    refuse_odd_options,
    sbatch_options_of,
    stock_job,
)
from zorse_megatron.cli.options import AsJson, ClusterFile, PlanFile
from zorse_megatron.files.read_write import write_text
from zorse_megatron.launch.batch_script import (
    BatchOptions,
    batch_script,
    components_of,
    refuse_edited,
    with_checksum,
)
from zorse_megatron.launch.batch_script import Elastic as OfElastic
from zorse_megatron.launch.torchrun_lines import (
    DEFAULT_PORT,
    Rendezvous,
    elastic_torchrun_lines,
    fewest_nodes,
    torchrun_lines,
)


def launch(  # noqa: PLR0917
    context: typer.Context,
    path: PlanFile,
    cluster: ClusterFile,
    slurm: Slurm = None,
    force: Force = False,
    torchrun: Torchrun = False,
    stock: Stock = False,
    node_names: NodeNames = False,
    partition: Partitions = None,
    sbatch: Sbatch = None,
    python: Python = "python",
    master_addr: MasterAddr = None,
    master_port: MasterPort = DEFAULT_PORT,
    elastic: Elastic = False,
    plans: PlansDirectory = DEFAULT_PLANS,
    min_gpus: MinGpus = 1,
    plan_options: PlanOptions = "",
    plan_limit: PlanLimit = DEFAULT_PLAN_LIMIT_S,
    as_json: AsJson = False,
) -> None:
    """Write the Slurm job or torchrun commands that start a plan's ranks on the right GPUs."""
    with reported_errors(as_json=as_json):
        refuse_odd_options(
            context,
            slurm=slurm,
            torchrun=torchrun,
            stock=stock,
            partition=partition or [],
            sbatch=sbatch or [],
            inputs=[path, cluster],
        )
        when_lost = ElasticOptions(
            plans=plans,
            min_gpus=min_gpus,
            plan_options=plan_options,
            plan_limit_s=plan_limit,
        )
        refuse_odd_elastic(context, when_lost, is_elastic=elastic)
        given, make = training_flags(context) or (), stock_job if stock else planned_job
        job = make(path, cluster, given, names_nodes=node_names or elastic)
        if slurm is None and elastic:
            refuse_without_save(job.training)
            lines = elastic_torchrun_lines(
                job.cluster,
                _joined(path, cluster, when_lost, given),
                rendezvous=Rendezvous(
                    name=job.name, address=master_addr, port=master_port, min_gpus=min_gpus
                ),
            )
        elif slurm is None:
            lines = torchrun_lines(
                job.cluster,
                job.training,
                master_address=master_addr,
                master_port=master_port,
            )
        else:
            when_elastic = None
            if elastic:
                refuse_without_save(job.training)
                words = ("-m", "zorse_megatron", "join", *_joined(path, cluster, when_lost, given))
                job = replace(job, training=replace(job.training, words=words, module=None))
                fewest = fewest_nodes(job.cluster, min_gpus)
                when_elastic = OfElastic(fewest_nodes=fewest, plans=plans)
            options = BatchOptions(
                python=python,
                names_nodes=node_names or elastic,
                elastic=when_elastic,
                more=sbatch_options_of(sbatch or []),
            )
            lines = _write_script(slurm, job, options, partition or [], force=force)
    _say(job, lines, slurm, as_json=as_json)


def _joined(
    path: Path, cluster: Path, when_lost: ElasticOptions, given: Sequence[str]
) -> list[str]:
    """Words of the `zorse join` that torchrun runs."""
    return [str(path), "--cluster", str(cluster), *when_lost.words(), "--", *given]


def _write_script(
    target: Path, job: LaunchedJob, options: BatchOptions, partitions: Sequence[str], *, force: bool
) -> str:
    """Write the batch script and return it. Raises ZorseError."""
    components = components_of(job.cluster, partitions_of(partitions))
    script = with_checksum(batch_script(components, job.training, options, title=job.title))
    if not force:
        refuse_edited(target, script)
    write_text(target, script)
    return script


def _say(job: LaunchedJob, lines: str, slurm: Path | None, *, as_json: bool) -> None:
    """Print torchrun's lines, or where the script is."""
    resumes = job.training.resumes
    if as_json:
        written = None if slurm is None else str(slurm)
        told = lines if slurm is None else None
        print_json({"ok": True, "written": written, "lines": told, "resumes": resumes})
        return
    if slurm is None:
        print_plain(lines.rstrip())
        for note in job.notes:
            print_plain(f"# note: {note}")
        return
    print_plain(f"wrote {slurm}: sbatch {shlex.quote(str(slurm))}")
    for note in job.notes:
        print_plain(f"note: {note}")
    if not resumes:
        print_plain("note: the command has no --save, so the job is not requeued after a failure")
