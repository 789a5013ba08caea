"""Validate the options of `zorse launch`, all at once, before any file is read."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import is_given
from zorse_megatron.errors import Problem
from zorse_megatron.files.writable import unwritable_problems
from zorse_megatron.launch.batch_script import OWN_OPTIONS
from zorse_megatron.launch.sbatch_options import closest, is_known

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
