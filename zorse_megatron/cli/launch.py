"""`zorse launch`: the batch script, or each node's torchrun line, that starts a plan's ranks."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import print_json, print_plain, reported_errors
from zorse_megatron.cli.fits import model_problems, workload_in_flags
from zorse_megatron.cli.launch_options import (
    partitions_of,
    refuse_odd_options,
    sbatch_options_of,
)
from zorse_megatron.cli.options import AsJson, ClusterFile
from zorse_megatron.errors import FlagError
from zorse_megatron.files.write import write_text
from zorse_megatron.launch.as_written import refuse_edited, with_checksum
from zorse_megatron.launch.batch_script import BatchOptions, batch_script
from zorse_megatron.launch.components import components_of, refuse_odd_names
from zorse_megatron.launch.torchrun_lines import DEFAULT_PORT, torchrun_lines
from zorse_megatron.launch.training import training_of
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster import Cluster
from zorse_megatron.schema.cluster_yaml import load_cluster
from zorse_megatron.schema.load import fingerprint, load_plan
from zorse_megatron.schema.placement import refuse_other_cluster
from zorse_megatron.schema.plan import Plan


def launch(  # noqa: PLR0917
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan file.")],
    cluster: ClusterFile,
    slurm: Annotated[
        Path | None,
        typer.Option("--slurm", metavar="FILE", help="Write the batch script of a Slurm job."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Of Slurm: replace FILE even if it was edited by hand.")
    ] = False,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Print the torchrun line of each node.")
    ] = False,
    node_names: Annotated[
        bool,
        typer.Option(
            "--node-names",
            help="The cluster file's nodes bear their real names, as after zorse discover: take "
            "these very nodes, and check at the start that each rank is on its own.",
        ),
    ] = False,
    partition: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]PARTITION",
            help="Slurm's partition, for all nodes or for those with a kind of GPU or a name.",
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="A further option of sbatch, such as time=24:00:00."),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Of Slurm: the interpreter that has zorse-megatron on the nodes.")
    ] = "python",
    master_addr: Annotated[
        str | None,
        typer.Option(
            help="Of torchrun: address of the first node. Left out: its name, or localhost where "
            "it is the only one."
        ),
    ] = None,
    master_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Of torchrun: a free port of the first node.")
    ] = DEFAULT_PORT,
    as_json: AsJson = False,
) -> None:
    """Write what starts the plan's ranks on the right GPUs of the cluster."""
    with reported_errors(as_json=as_json):
        refuse_odd_options(
            context,
            slurm=slurm,
            torchrun=torchrun,
            partition=partition or [],
            sbatch=sbatch or [],
            inputs=[path, cluster],
        )
        plan = load_plan(path)
        refuse_unsupported(plan, str(path))
        there = load_cluster(cluster)
        refuse_other_cluster(plan, there, str(path))
        given = training_flags(context) or ()
        training = training_of(given, plan=str(path), cluster=str(cluster) if node_names else None)
        notes = _refuse_other_training(plan, given, path, there)
        if node_names:
            refuse_odd_names(there)
        if torchrun:
            lines = torchrun_lines(
                there, training, master_address=master_addr, master_port=master_port
            )
        else:
            components = components_of(there, partitions_of(partition or []))
            options = BatchOptions(
                python=python, names_nodes=node_names, more=sbatch_options_of(sbatch or [])
            )
            title = _title(plan, path, there)
            lines = with_checksum(batch_script(components, training, options, title=title))
        if slurm is not None:
            if not force:
                refuse_edited(slurm, lines)
            write_text(slurm, lines)
    if as_json:
        written = None if slurm is None else str(slurm)
        told = lines if slurm is None else None
        print_json({"ok": True, "written": written, "lines": told, "resumes": training.resumes})
        return
    if slurm is None:
        print_plain(lines.rstrip())
        for note in notes:
            print_plain(f"# note: {note}")
        return
    print_plain(f"wrote {slurm}: sbatch {shlex.quote(str(slurm))}")
    for note in notes:
        print_plain(f"note: {note}")
    if not training.resumes:
        print_plain("note: the command has no --save, so the job is not requeued after a failure")


def _title(plan: Plan, path: Path, cluster: Cluster) -> str:
    name = f" of {cluster.name}" if cluster.name else ""
    return f"Trains under {path} (plan {fingerprint(plan)}) on the GPUs{name}."


def _refuse_other_training(
    plan: Plan, given: Sequence[str], path: Path, cluster: Cluster
) -> tuple[str, ...]:
    """Raise FlagError for a command that the plan is not for; return notes on it."""
    workload, _ = workload_in_flags(given, plan, None, cluster.kinds)
    problems = list(model_problems(plan, workload, str(path)))
    if problems:
        raise FlagError(f"the training command does not fit {path}", problems)
    return workload.notes
