"""`zorse launch`: write what starts a plan's ranks, also on the nodes that are left."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from zorse_megatron.cli.command_group import training_flags
from zorse_megatron.cli.commands.elastic import ElasticOptions
from zorse_megatron.cli.console import Output, conflicts, refuse
from zorse_megatron.cli.options import ClusterFile, PlanFile, answers, given_options
from zorse_megatron.cli.workload_costs import workload_in_flags
from zorse_megatron.errors import Problem
from zorse_megatron.files.read_write import write_text
from zorse_megatron.files.writable import unwritable_problems
from zorse_megatron.flags.check import naming_flags_too
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.torch_builds import build_notes
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.rank_placement import refuse_other_cluster
from zorse_megatron.launch.batch_script import (
    OWN_OPTIONS,
    BatchOptions,
    Elastic,
    batch_script,
    components_of,
    refuse_edited,
    refuse_odd_names,
    with_checksum,
)
from zorse_megatron.launch.training_command import (
    DEFAULT_PORT,
    TrainingCommand,
    elastic_torchrun_lines,
    fewest_nodes,
    in_order,
    refuse_other_dtype,
    replaced_sizes,
    stock_training_of,
    stripped_of_layout,
    torchrun_lines,
    training_of,
    without_layout,
)
from zorse_megatron.plan.plan_file import fingerprint, load_plan
from zorse_megatron.schedule.lower import refuse_unsupported

_OF_SLURM = ("force", "partition", "sbatch", "python")
_OF_TORCHRUN = ("master_addr", "master_port")
_OF_ELASTIC = ("plans", "min_gpus", "plan_options", "plan_limit")
_LONG_OPTION = re.compile(r"([a-z][a-z0-9-]*)(=[^\n]*)?")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a plan's ranks are started."""

    context: typer.Context
    slurm: Annotated[
        Path | None,
        typer.Option("--slurm", metavar="FILE", help="Write a Slurm batch script to this file."),
    ] = None
    force: Annotated[
        bool,
        typer.Option("--force", help="With --slurm: overwrite FILE even if it was edited by hand."),
    ] = False
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Print each node's torchrun command.")
    ] = False
    stock: Annotated[
        bool,
        typer.Option(
            "--stock",
            help="Start unmodified Megatron in the plan's layout, with its GPUs in stock's order; "
            "the nodes need not have zorse-megatron.",
        ),
    ] = False
    node_names: Annotated[
        bool,
        typer.Option(
            "--node-names",
            help="The cluster file has real host names, as zorse discover writes them: request "
            "exactly these nodes, and check at start-up that each rank runs on its own.",
        ),
    ] = False
    partition: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[KIND=]PARTITION",
            help="Slurm partition for all nodes, or for those of this GPU kind or name; "
            "repeatable.",
        ),
    ] = None
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="Further sbatch option, such as time=24:00:00; repeatable."
        ),
    ] = None
    python: Annotated[
        str,
        typer.Option(
            help="With --slurm: the nodes' Python interpreter that has zorse-megatron; with "
            "--stock, that has Megatron."
        ),
    ] = "python"
    master_addr: Annotated[
        str | None,
        typer.Option(
            help="With --torchrun: address of the first node. Default: its name, or localhost if "
            "it is the only node."
        ),
    ] = None
    master_port: Annotated[
        int,
        typer.Option(min=1, max=65535, help="With --torchrun: a free port on the first node."),
    ] = DEFAULT_PORT
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic",
            help="When nodes are lost, plan again for those that are left and go on from the "
            "newest checkpoint. Needs real host names in the cluster file, and --save.",
        ),
    ] = False

    @property
    def names_nodes(self) -> bool:
        """Whether ranks take their nodes from the cluster file."""
        return self.node_names or self.elastic

    @property
    def partitions(self) -> dict[str, str]:
        """Key -> partition, of `[KEY=]PARTITION`; without a key, "", it is that of all others."""
        pairs = [text.rpartition("=") for text in self.partition or ()]
        return {key: partition for key, _, partition in pairs}

    @property
    def sbatch_options(self) -> tuple[str, ...]:
        """Without their dashes."""
        return tuple(text.removeprefix("--") for text in self.sbatch or ())

    def problems(self, inputs: Sequence[Path]) -> Iterator[Problem]:
        """Yield what is malformed, what would be ignored, and what contradicts."""
        yield from unwritable_problems({"--slurm": self.slurm}, inputs=inputs)
        yield from self._mode_problems()
        yield from self._stock_problems() if self.stock else ()
        yield from self._partition_problems()
        for text in self.sbatch_options:
            yield from _sbatch_problems(text)
        if not self.elastic:
            yield from self._without_effect(_OF_ELASTIC, "it without --elastic", "add", "--elastic")

    def _mode_problems(self) -> Iterator[Problem]:
        if (self.slurm is None) != self.torchrun:
            yield Problem(
                where="--slurm, --torchrun",
                found="neither" if self.slurm is None else "both",
                expected="one of the two",
                remedy="Give --slurm FILE for a batch script, or --torchrun for each node's "
                "command.",
            )
        elif self.torchrun:
            yield from self._without_effect(_OF_SLURM, "it with --torchrun", "use", "--slurm")
        else:
            yield from self._without_effect(_OF_TORCHRUN, "it with --slurm", "use", "--torchrun")

    def _without_effect(
        self, names: Sequence[str], found: str, verb: str, needed: str
    ) -> Iterator[Problem]:
        instead = " instead" if verb == "use" else ""
        for option in given_options(self.context, names):
            yield Problem(
                where=option,
                found=found,
                expected=f"it only with {needed}",
                remedy=f"Remove it, since it has no effect, or {verb} {needed}{instead}.",
            )

    def _stock_problems(self) -> Iterator[Problem]:
        """What unmodified Megatron cannot do, or has no use for."""
        if self.elastic:
            why = "stock Megatron cannot go on in another layout when nodes are lost"
            yield from conflicts(["--elastic"], "--stock", why=why)
        if self.node_names and self.torchrun:
            why = "each line names its node; stock Megatron does not check it"
            yield from conflicts(["--node-names"], "--stock", why=why)

    def _partition_problems(self) -> Iterator[Problem]:
        texts = self.partition or ()
        for text in texts:
            partition = text.rpartition("=")[2]
            if partition.split() != [partition]:
                yield Problem(
                    where="--partition",
                    found=repr(text),
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


def _sbatch_problems(text: str) -> Iterator[Problem]:
    spelt = _LONG_OPTION.fullmatch(text)
    # sbatch takes the beginning of an option's name for the option.
    own = [] if spelt is None else [name for name in OWN_OPTIONS if name.startswith(spelt[1])]
    if spelt is None:
        expected, remedy = "one long option of sbatch", "Such as --sbatch time=24:00:00."
    elif own:
        expected = f"nothing that contradicts the script's own lines, as --{own[0]} does"
        remedy = OWN_OPTIONS[own[0]]
    else:  # sbatch itself says at once whether it has it
        return
    yield Problem(where="--sbatch", found=repr(text), expected=expected, remedy=remedy)


# What is started, from its files and the training command.


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is to be started, and where."""

    cluster: Cluster
    """Nodes, and the GPUs of each, in the order of ranks."""
    training: TrainingCommand
    title: str
    name: str
    """The same for the same plan."""
    notes: tuple[str, ...]
    """For the user, on the training command and the GPUs."""


def _job(path: Path, cluster: Path, given: Sequence[str], options: LaunchOptions) -> _Job:
    """Our runtime under a plan, or unmodified Megatron in its layout.

    Raises ZorseError where files and command do not go together, or a plan is no layout of stock's.
    """
    from zorse_megatron.planner.baselines.stock_plans import grid_of_plan, layout_flags

    source = str(path)
    words = stripped_of_layout(given) if options.stock else given
    with naming_flags_too(read_command(words) if words else None, by_stock=options.stock):
        plan, there = load_plan(path), load_cluster(cluster)
        refuse_other_cluster(plan, there, source)
        if not options.stock:
            refuse_unsupported(plan, source)
    name, of = fingerprint(plan), f" of {there.name}" if there.name else ""
    names_nodes, ordered = options.names_nodes, there
    notes: tuple[str, ...] = ()
    if options.stock:
        grid, order = grid_of_plan(plan, [node.ranks for node in there.nodes], source)
        layout = layout_flags(grid)
        words, notes = without_layout(given, layout), replaced_sizes(given, layout)
        refuse_other_dtype(words, plan.groups[0].compute_dtype)
        training = stock_training_of(words, layout, grid.tensor)
        title = f"Unmodified Megatron in the layout of {path} ({name}){of}."
        ordered = in_order(there, order)
    else:
        training = training_of(given, plan=source, cluster=str(cluster) if names_nodes else None)
        title = f"Trains under {path} (plan {name}) on the GPUs{of}."
    workload, _ = workload_in_flags(words, plan, path, there.kinds, by_stock=options.stock)
    if names_nodes:
        refuse_odd_names(there)
    return _Job(
        cluster=ordered,
        training=training,
        title=title,
        name=f"zorse-{name}",
        notes=(*notes, *workload.notes, *build_notes(list(there.kinds))),
    )


@answers
def launch(
    path: PlanFile, cluster: ClusterFile, options: LaunchOptions, when_lost: ElasticOptions
) -> Output:
    """Write the Slurm job or torchrun commands that start a plan's ranks on the right GPUs."""
    refuse(
        [
            *options.problems(inputs=[path, cluster]),
            *(when_lost.problems() if options.elastic else ()),
        ]
    )
    given = training_flags(options.context) or ()
    job = _job(path, cluster, given, options)
    joined = [str(path), "--cluster", str(cluster), *when_lost.words(), "--", *given]
    if options.elastic:
        when_lost.refuse_without_save(job.training)
    if options.slurm is not None:
        return _script(options.slurm, job, options, when_lost, joined)
    address, port = options.master_addr, options.master_port
    if options.elastic:
        lines = elastic_torchrun_lines(
            job.cluster,
            joined,
            name=job.name,
            min_gpus=when_lost.min_gpus,
            master_address=address,
            master_port=port,
        )
    else:
        lines = torchrun_lines(job.cluster, job.training, master_address=address, master_port=port)
    return Output(
        values={"written": None, "lines": lines, "resumes": job.training.resumes},
        shown=[lines.rstrip(), *(f"# note: {note}" for note in job.notes)],
    )


def _script(
    target: Path,
    job: _Job,
    options: LaunchOptions,
    when_lost: ElasticOptions,
    joined: Sequence[str],
) -> Output:
    """Write the batch script; `joined`: words of the `zorse join` of an elastic one."""
    training, elastic = job.training, None
    if options.elastic:
        words = ("-m", "zorse_megatron", "join", *joined)
        training = replace(training, words=words, module=None)
        fewest = fewest_nodes(job.cluster, when_lost.min_gpus)
        elastic = Elastic(fewest_nodes=fewest, plans=when_lost.plans)
    asked = BatchOptions(
        python=options.python,
        names_nodes=options.names_nodes,
        elastic=elastic,
        more=options.sbatch_options,
    )
    components = components_of(job.cluster, options.partitions)
    script = with_checksum(batch_script(components, training, asked, title=job.title))
    if not options.force:
        refuse_edited(target, script)
    write_text(target, script)
    no_save = "the command has no --save, so the job is not requeued after a failure"
    notes = [*job.notes, *([] if training.resumes else [no_save])]
    return Output(
        values={"written": str(target), "lines": None, "resumes": training.resumes},
        shown=[
            f"wrote {target}: sbatch {shlex.quote(str(target))}",
            *(f"note: {note}" for note in notes),
        ],
    )
