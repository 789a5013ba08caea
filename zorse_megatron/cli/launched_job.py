"""What `zorse launch` starts, from its options, its files and the training command."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import is_given
from zorse_megatron.cli.workload_costs import workload_in_flags, workload_problems
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.files.writable import unwritable_problems
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.rank_placement import refuse_other_cluster
from zorse_megatron.launch.batch_script import OWN_OPTIONS, closest, is_known, refuse_odd_names
from zorse_megatron.launch.stock_command import (
    in_order,
    refuse_other_dtype,
    replaced_sizes,
    stock_training_of,
    without_layout,
)
from zorse_megatron.launch.training_command import TrainingCommand, training_of
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint, load_plan
from zorse_megatron.schedule.lower import refuse_unsupported


@dataclass(frozen=True, kw_only=True)
class LaunchedJob:
    """What is to be started, and where."""

    cluster: Cluster
    """Nodes, and the GPUs of each, in the order of ranks."""
    training: TrainingCommand
    title: str
    name: str
    """The same for the same plan."""
    notes: tuple[str, ...]
    """For the user, on the training command and the GPUs."""


def planned_job(
    path: Path, cluster: Path, given: Sequence[str], *, names_nodes: bool
) -> LaunchedJob:
    """Our runtime under a plan. Raises ZorseError if files and command do not go together."""
    plan, there = _files(path, cluster)
    refuse_unsupported(plan, str(path))
    training = training_of(given, plan=str(path), cluster=str(cluster) if names_nodes else None)
    notes = _refuse_other_training(plan, given, path, there)
    if names_nodes:
        refuse_odd_names(there)
    title = f"Trains under {path} (plan {fingerprint(plan)}) on the GPUs{_of(there)}."
    return _job(plan, there, training, title, notes)


def stock_job(path: Path, cluster: Path, given: Sequence[str], *, names_nodes: bool) -> LaunchedJob:
    """Unmodified Megatron in a plan's layout. Raises ZorseError as `planned_job`, and for a plan
    that is no layout of stock's or a command that contradicts it."""
    from zorse_megatron.planner.baselines.stock_plans import grid_of_plan, layout_flags

    plan, there = _files(path, cluster)
    grid, order = grid_of_plan(plan, [node.ranks for node in there.nodes], str(path))
    refuse_unsupported(plan, str(path))
    layout = layout_flags(grid)
    rest = without_layout(given, layout)
    refuse_other_dtype(rest, plan.groups[0].compute_dtype)
    training = stock_training_of(rest, layout, grid.tensor)
    notes = _refuse_other_training(plan, rest, path, there, by_stock=True)
    if names_nodes:
        refuse_odd_names(there)
    title = f"Unmodified Megatron in the layout of {path} ({fingerprint(plan)}){_of(there)}."
    notes = (*replaced_sizes(given, layout), *notes)
    return _job(plan, in_order(there, order), training, title, notes)


def _files(path: Path, cluster: Path) -> tuple[Plan, Cluster]:
    plan, there = load_plan(path), load_cluster(cluster)
    refuse_other_cluster(plan, there, str(path))
    return plan, there


def _job(
    plan: Plan, cluster: Cluster, training: TrainingCommand, title: str, notes: tuple[str, ...]
) -> LaunchedJob:
    return LaunchedJob(
        cluster=cluster,
        training=training,
        title=title,
        name=f"zorse-{fingerprint(plan)}",
        notes=(*notes, *build_notes(list(cluster.kinds))),
    )


def _of(cluster: Cluster) -> str:
    return f" of {cluster.name}" if cluster.name else ""


def _refuse_other_training(
    plan: Plan, given: Sequence[str], path: Path, cluster: Cluster, *, by_stock: bool = False
) -> tuple[str, ...]:
    """Raise FlagError for a command that the plan is not for; return notes on it."""
    workload, _ = workload_in_flags(given, plan, cluster.kinds, by_stock=by_stock)
    problems = list(workload_problems(plan, workload, str(path)))
    if problems:
        raise FlagError(f"the training command does not fit {path}", problems)
    return workload.notes


# Validate the options of `zorse launch`, all at once, before any file is read.


Slurm = Annotated[
    Path | None,
    typer.Option("--slurm", metavar="FILE", help="Write a Slurm batch script to this file."),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="With --slurm: overwrite FILE even if it was edited by hand."),
]
Stock = Annotated[
    bool,
    typer.Option(
        "--stock",
        help="Start unmodified Megatron in the plan's layout, with its GPUs in stock's order; the "
        "nodes need not have zorse-megatron.",
    ),
]
Torchrun = Annotated[bool, typer.Option("--torchrun", help="Print each node's torchrun command.")]
NodeNames = Annotated[
    bool,
    typer.Option(
        "--node-names",
        help="The cluster file has real host names, as zorse discover writes them: request exactly "
        "these nodes, and check at start-up that each rank runs on its own.",
    ),
]
Partitions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[KIND=]PARTITION",
        help="Slurm partition for all nodes, or for those of this GPU kind or name; repeatable.",
    ),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION", help="Further sbatch option, such as time=24:00:00; repeatable."
    ),
]
Python = Annotated[
    str,
    typer.Option(
        help="With --slurm: the nodes' Python interpreter that has zorse-megatron; with --stock, "
        "that has Megatron."
    ),
]
MasterAddr = Annotated[
    str | None,
    typer.Option(
        help="With --torchrun: address of the first node. Default: its name, or localhost if it is "
        "the only node."
    ),
]
MasterPort = Annotated[
    int, typer.Option(min=1, max=65535, help="With --torchrun: a free port on the first node.")
]

_OF_SLURM = ("force", "partition", "sbatch", "python")
_OF_TORCHRUN = ("master_addr", "master_port")
_LONG_OPTION = re.compile(r"([a-z][a-z0-9-]*)(=[^\n]*)?")


def refuse_odd_options(
    context: typer.Context,
    *,
    slurm: Path | None,
    torchrun: bool,
    stock: bool,
    partition: Sequence[str],
    sbatch: Sequence[str],
    inputs: Sequence[Path],
) -> None:
    """Raise CommandError for what is malformed, what would be ignored, and what contradicts."""
    problems = [
        *unwritable_problems({"--slurm": slurm}, inputs=inputs),
        *_mode_problems(context, slurm, torchrun),
        *(_stock_problems(context, torchrun=torchrun) if stock else ()),
        *_partition_problems(partition),
        *_sbatch_problems(sbatch),
    ]
    if problems:
        raise CommandError("the command cannot be run", problems)


def partitions_of(texts: Sequence[str]) -> dict[str, str]:
    """Key -> partition, of `[KEY=]PARTITION`; without a key, "", it is that of all others."""
    pairs = [text.rpartition("=") for text in texts]
    return {key: partition for key, _, partition in pairs}


def sbatch_options_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Return them without their dashes."""
    return tuple(text.removeprefix("--") for text in texts)


def _mode_problems(context: typer.Context, slurm: Path | None, torchrun: bool) -> Iterator[Problem]:
    if (slurm is None) == (not torchrun):
        yield Problem(
            where="--slurm, --torchrun",
            found="neither" if slurm is None else "both",
            expected="one of the two",
            remedy="Give --slurm FILE for a batch script, or --torchrun for each node's command.",
        )
        return
    chosen, other = ("--torchrun", "--slurm") if torchrun else ("--slurm", "--torchrun")
    for name in _OF_SLURM if torchrun else _OF_TORCHRUN:
        if is_given(context, name):
            yield Problem(
                where=f"--{name.replace('_', '-')}",
                found=f"it with {chosen}",
                expected=f"it only with {other}",
                remedy=f"Remove it, since it has no effect, or use {other} instead.",
            )


def _stock_problems(context: typer.Context, *, torchrun: bool) -> Iterator[Problem]:
    """What unmodified Megatron cannot do, or has no use for."""
    reasons = {"elastic": "Stock Megatron cannot go on in another layout when nodes are lost."}
    if torchrun:
        reasons["node_names"] = "Each line names its node; stock Megatron does not check it."
    for name, reason in reasons.items():
        if is_given(context, name):
            yield Problem(
                where=f"--{name.replace('_', '-')}",
                found="it with --stock",
                expected="one of the two",
                remedy=f"{reason} Leave one of them out.",
            )


def _partition_problems(texts: Sequence[str]) -> Iterator[Problem]:
    for text in texts:
        partition = text.rpartition("=")[2]
        if partition.split() != [partition]:
            yield _misspelt(
                "--partition",
                text,
                expected="the name of a partition, in one word",
                remedy="Such as --partition A6000=new; leave it out for the site's default.",
            )
    for key, count in Counter(text.rpartition("=")[0] for text in texts).items():
        if count > 1:
            yield Problem(
                where="--partition",
                found=f"{count} for {key or 'all other nodes'}",
                expected="one",
                remedy="Keep one of them.",
            )


def _sbatch_problems(texts: Sequence[str]) -> Iterator[Problem]:
    for text in sbatch_options_of(texts):
        spelt = _LONG_OPTION.fullmatch(text)
        if spelt is None:
            yield _misspelt(
                "--sbatch",
                text,
                expected="one long option of sbatch",
                remedy="Such as --sbatch time=24:00:00.",
            )
            continue
        # sbatch takes the beginning of an option's name for the option.
        own = [name for name in OWN_OPTIONS if name.startswith(spelt[1])]
        if own:
            yield _misspelt(
                "--sbatch",
                text,
                expected=f"nothing that contradicts the script's own lines, as --{own[0]} does",
                remedy=OWN_OPTIONS[own[0]],
            )
        elif not is_known(spelt[1]):
            yield _misspelt(
                "--sbatch",
                text,
                expected="one of the long options of sbatch",
                remedy=closest(spelt[1]),
            )


def _misspelt(option: str, text: str, *, expected: str, remedy: str) -> Problem:
    return Problem(where=option, found=repr(text), expected=expected, remedy=remedy)
