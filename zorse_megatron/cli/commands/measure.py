"""`zorse discover`, `profile` and `doctor`: measure and check the machines at hand."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from zorse_megatron import __version__
from zorse_megatron.cli.command_group import AnswersInJson, TakesTrainingFlags, training_flags
from zorse_megatron.cli.console import (
    Output,
    Tell,
    conflicts,
    print_plain,
    progress_shown,
    refusal,
    refuse,
    reported_errors,
)
from zorse_megatron.cli.observed_run import observed_run
from zorse_megatron.cli.options import (
    ClusterFile,
    DtypeName,
    Model,
    SeqLength,
    StatusDirectory,
    answers,
    given_options,
)
from zorse_megatron.cli.workload import Workload, workload_of
from zorse_megatron.doctor.report import (
    REPORT_NAME,
    Finding,
    Report,
    dump_report,
    load_report,
    report_values,
)
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.read_write import write_text
from zorse_megatron.files.strict import read_file
from zorse_megatron.files.wording import number_of
from zorse_megatron.files.writable import folder_problems, refuse_unwritable
from zorse_megatron.flags.check import check_command
from zorse_megatron.flags.command import read_command, split_script
from zorse_megatron.inputs.cluster_yaml import CLUSTER_FILE, dump_cluster, parse_cluster
from zorse_megatron.inputs.profile import save_profile
from zorse_megatron.inputs.status import RUNNING_PLAN_NAME
from zorse_megatron.launch.rank_environment import LaunchedRank, launched_rank
from zorse_megatron.measure.tasks import single_layer_flags
from zorse_megatron.plan.plan_file import load_plan

if TYPE_CHECKING:
    from zorse_megatron.doctor.checks import Check
    from zorse_megatron.measure.on_ranks.cluster_discovery import Discovered
    from zorse_megatron.measure.on_ranks.profile_run import Profiled

Again = Annotated[
    bool, typer.Option("--again", help="Measure again even what the files already have.")
]


@contextmanager
def as_ranks(
    title: str, *, messages_on_gpu: bool, as_json: bool
) -> Iterator[tuple[LaunchedRank, Tell]]:
    """Run the block on every rank of the job; yields this rank, and what shows progress.

    Errors end every rank with its message and exit code 1, or 3 where another rank is gone.
    """
    # One answer for programs: the other ranks complain in words.
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    with reported_errors(as_json=as_json and is_first):
        refuse_without("train", what=f"measuring ({title})")
        launched = launched_rank(os.environ, socket.gethostname())
        # Here and not above: other commands start without torch.
        from zorse_megatron.measure.on_ranks.ranks import measuring_job

        with (
            # This one first: it forks, and the progress bar has a thread.
            measuring_job(launched, messages_on_gpu=messages_on_gpu),
            progress_shown("starting", wanted=launched.rank == 0, title=title) as tell,
        ):
            yield launched, tell


@dataclass(frozen=True, kw_only=True)
class DiscoverOptions:
    """What is measured of a cluster, and where it is written."""

    out: Annotated[
        Path, typer.Option("--out", metavar="YAML", help="Write the cluster file here.")
    ] = Path("cluster.yaml")
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="JSON",
            help="Write measured transfer times here. Default: profile.json beside the cluster "
            "file.",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of the cluster.")] = None
    largest_mb: Annotated[
        float, typer.Option(min=0.001, max=4096, help="Largest message, in MB (10^6 bytes).")
    ] = 64.0
    time_limit: Annotated[
        float,
        typer.Option(min=0, help="Stop growing messages once one takes this many seconds."),
    ] = 2.0
    again: Again = False


@answers
def discover(*, options: DiscoverOptions, as_json: bool) -> Output | None:
    """Measure the devices and links of the nodes it runs on, with one rank per GPU.

    Start it with srun or torchrun. On nodes without GPUs it measures CPU ranks.
    """
    profile = options.profile or options.out.with_name("profile.json")
    # Both are read back, by this command or a later run of it.
    refuse_unwritable({"--out": options.out, "--profile": profile}, may_be_stream=False)
    with as_ranks("discover", messages_on_gpu=True, as_json=as_json) as (launched, tell):
        from zorse_megatron.measure.on_ranks.cluster_discovery import Discovery
        from zorse_megatron.measure.on_ranks.cluster_discovery import discover as measure

        wanted = Discovery(
            cluster=options.out,
            profile=profile,
            again=options.again,
            largest_bytes=round(1e6 * options.largest_mb),
            time_limit_s=options.time_limit,
            name=options.name,
        )
        found = measure(launched, wanted, tell)
    return _discovered(options.out, profile, found) if launched.rank == 0 else None


def _discovered(output: Path, profile: Path, found: "Discovered") -> Output:
    ranks = sum(len(node.ranks) for node in found.nodes)
    kinds = list(dict.fromkeys(node.kind for node in found.nodes))
    values = {
        "cluster": str(output),
        "profile": str(profile),
        "nodes": len(found.nodes),
        "ranks": ranks,
        "node_kinds": kinds,
        "measured": found.num_measured,
        "known": found.num_known,
    }
    shown = [
        f"{output}: {number_of(len(found.nodes), 'node')} with {number_of(ranks, 'rank')}, "
        f"{number_of(found.num_measured, 'measurement')}",
        *(f"  {sum(node.kind == kind for node in found.nodes)} x [{kind}]" for kind in kinds),
    ]
    if not found.num_measured:
        shown.append("nothing left to measure; --again repeats the measurements")
    return Output(values=values, shown=shown, notes=found.notes)


# `zorse profile`: measure, correct and show profiles.


profile = typer.Typer(
    cls=AnswersInJson,
    no_args_is_help=True,
    help="Measure and correct profiles of layer times and memory.",
)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is measured of a training command's layers, and where it is written."""

    context: typer.Context
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="YAML",
            help="The cluster file, whose GPUs the ranks must have. Without it any GPUs are "
            "measured, and of those that are not well known what a cluster file has to say.",
        ),
    ] = None
    out: Annotated[
        Path,
        typer.Option("--out", metavar="JSON", help="Write the profile here, or add to it."),
    ] = Path("profile.json")
    max_micro_batch: Annotated[
        int, typer.Option(min=1, max=65536, help="Largest micro-batch size to time.")
    ] = 64
    # Passes are timed nine times, of micro-batches that double: two minutes on a GPU.
    time_limit: Annotated[
        float,
        typer.Option(min=0, help="Stop growing micro-batches once one takes this many seconds."),
    ] = 1.0
    again: Again = False


@profile.command("measure", cls=TakesTrainingFlags)
@answers
def measure_profile(*, options: MeasureOptions, as_json: bool) -> Output | None:
    """Time the layers of a training command: forward, backward and optimizer step.

    On one GPU start it as it is; on a cluster with srun or torchrun, one rank per GPU of the
    cluster file. One rank measures for each kind of GPU, doubling the micro-batch until it reaches
    the memory or a limit.
    """
    refuse_unwritable({"--out": options.out}, inputs=[options.cluster], may_be_stream=False)
    workload, (script, flags) = _workload(options.context)
    largest, batch = options.max_micro_batch, workload.global_batch_size
    with as_ranks("profile", messages_on_gpu=False, as_json=as_json) as (launched, tell):
        from zorse_megatron.measure.on_ranks.profile_run import ProfileRun
        from zorse_megatron.measure.on_ranks.profile_run import measure_profile as measure

        assert workload.dtype is not None and workload.dtype != "auto"  # flags always say one
        wanted = ProfileRun(
            cluster=options.cluster,
            output=options.out,
            script=script,
            flags=flags,
            shape=workload.model,
            dtype=workload.dtype,
            again=options.again,
            largest_size=min(largest, batch or largest),
            time_limit_s=options.time_limit,
        )
        found = measure(launched, wanted, tell)
    return _profiled(options.out, found) if launched.rank == 0 else None


def _workload(
    context: typer.Context,
) -> tuple[Workload, tuple[Path | None, tuple[str, ...]]]:
    command = training_flags(context)
    if command is None:
        raise refusal(
            "--",
            "no training command",
            "a training command's flags after --",
            "Such as: zorse profile measure -- --num-layers 32 ...",
        )
    name, flags = split_script(command)
    script = None if name is None else Path(name)
    if script is not None and not script.is_file():
        raise refusal(
            str(script),
            "no such file",
            "your training script: it builds the layers",
            "Correct the path, or omit it to build Megatron's GPT layers.",
        )
    workload = workload_of(model=None, flags=flags, checks_flags=False)
    # Of the command that measures: it leaves out what a plan decides.
    words = [*([] if script is None else [str(script)]), *single_layer_flags(flags, workload.model)]
    if problems := check_command(read_command(words), None):
        raise FlagError("no plan trains these layers", problems)
    return workload, (script, flags)


def _profiled(output: Path, found: "Profiled") -> Output:
    from zorse_megatron.measure.measured_cluster import kind_entry

    entries = [kind_entry(kind, rates) for kind, rates in found.rates.items()]
    values = {
        "profile": str(output),
        "measured": found.num_measured,
        "measured_kinds": list(found.measured_kinds),
        "known_kinds": list(found.known_kinds),
        "gpu_kinds": entries,
    }
    shown = [
        f"{output}: {found.num_measured} micro-batches and steps measured",
        *(f"  {kind}: measured" for kind in found.measured_kinds),
        *(f"  {kind}: measured already; --again repeats it" for kind in found.known_kinds),
    ]
    if entries:
        text = yaml.safe_dump({"gpu_kinds": entries}, sort_keys=False, allow_unicode=True)
        kinds = ", ".join(found.rates)
        shown += [f"not well known, so for the cluster file: {kinds}", text.rstrip()]
    return Output(values=values, shown=shown)


@dataclass(frozen=True, kw_only=True)
class CorrectOptions:
    """What a run is compared with, and where the corrected files go."""

    context: typer.Context
    cluster: ClusterFile
    out: Annotated[Path, typer.Option(metavar="PROFILE", help="Write the profile here.")]
    cluster_out: Annotated[
        Path, typer.Option(metavar="YAML", help="Write the cluster file with such kinds here.")
    ]
    model: Model = None
    seq_length: SeqLength = None
    dtype: DtypeName = None


@profile.command(cls=TakesTrainingFlags)
@answers
def correct(
    *,
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="What the plan was made from.")],
    directory: StatusDirectory,
    options: CorrectOptions,
) -> Output:
    """Scale the times of GPUs by what a run took: one that differs becomes a kind of its own.

    The run is compared with its plan as the profile has it, as by zorse plan --from-status.
    """
    out, cluster_out, cluster = options.out, options.cluster_out, options.cluster
    outputs = {"--out": out, "--cluster-out": cluster_out}
    refuse_unwritable(outputs, inputs=[path, directory, cluster])
    workload = workload_of(
        model=options.model,
        flags=training_flags(options.context),
        seq_length=options.seq_length,
        dtype=options.dtype,
        plan=load_plan(directory / RUNNING_PLAN_NAME),
    )
    data = read_file(cluster, CLUSTER_FILE)
    run = observed_run(directory, data, workload, [path], margin=0.0, source=str(cluster))
    text = dump_cluster(run.speeds.cluster, header=run.origin)
    parse_cluster(text.encode(), source="the cluster file that was to be written")
    assert run.speeds.profile is not None
    save_profile(run.speeds.profile, out)
    write_text(cluster_out, text)
    files = {"profile": str(out), "cluster": str(cluster_out)}
    return Output(
        values={**files, "kinds": run.speeds.kinds, "factors": run.factors},
        shown=[f"{out}, {cluster_out}: {', '.join(run.slower_ranks()) or 'nothing to correct'}"],
    )


# `zorse doctor`: check on the machine at hand that plans run there as stock Megatron does.


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Which checks are made, for how long, and where their report goes."""

    context: typer.Context
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Write doctor.json here.")] = (
        Path("doctor")
    )
    check: Annotated[
        list[str] | None,
        typer.Option(help="Make only these checks; repeat it for several."),
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Make only those of three minutes on one GPU.")
    ] = False
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the GPUs alone: a dry run.")] = False
    time_limit: Annotated[
        float, typer.Option(min=10, help="End what has not ended after so many seconds.")
    ] = 600.0
    read: Annotated[
        Path | None,
        typer.Option(
            "--read",
            metavar="REPORT",
            help="Make no checks: print what the report in this file says, and its figures in "
            "Markdown.",
        ),
    ] = None


@answers
def doctor(*, options: DoctorOptions, as_json: bool) -> Output:
    """Check on this machine's GPUs that plans train as stock Megatron does. No network.

    Without a GPU, all that needs none is checked on the CPU. Exit status 1 if a check fails, or had
    no time.
    """
    if options.read is not None:
        return _read_back(options.read, options.context)
    refuse_without("train", what="zorse doctor")
    checks = _checks(options.check or [], options.out, quick=options.quick)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    ends_s = time.monotonic() + options.time_limit
    report = _report(checks, ends_s, quiet=as_json)
    written = write_text(options.out / REPORT_NAME, dump_report(report), parents=True)
    return _found(report, [f"{report.summary}; written: {written}"])


def _read_back(path: Path, context: typer.Context) -> Output:
    others = given_options(context, ("out", "check", "quick", "cpu", "time_limit"))
    why = "a report that is read makes no checks"
    refuse(conflicts(others, "--read", why=why), "the report cannot be read")
    report = load_report(path)
    return _found(report, [*map(str, report.checks), report.summary, "", report.as_table()])


def _found(report: Report, shown: list[str]) -> Output:
    values = {"summary": report.summary, **report_values(report)}
    return Output(values=values, shown=shown, ok=report.is_well)


def _checks(names: list[str], output: Path, *, quick: bool) -> "tuple[Check, ...]":
    """Those that are asked for. Raises CommandError if there are none such, or no report is."""
    from zorse_megatron.doctor.checks import CHECKS

    checks = tuple(check for check in CHECKS if check.is_quick or not quick)
    known = tuple(dict.fromkeys(check.name for check in checks))
    is_new = not output.exists()
    problems = list(folder_problems("--out", output, [REPORT_NAME]))
    unknown = [name for name in names if name not in known]
    if unknown:
        problem = Problem(
            where="--check with --quick" if quick else "--check",
            found=" and ".join(unknown),
            expected=f"one of {', '.join(known)}",
            remedy="Leave it out to make all checks.",
        )
        problems.append(problem)
    if problems and is_new:
        with suppress(OSError):
            output.rmdir()
    refuse(problems, "the checks cannot be made")
    return tuple(check for check in checks if not names or check.name in names)


def _report(checks: "tuple[Check, ...]", ends_s: float, *, quiet: bool) -> Report:
    from zorse_megatron.doctor.checks import examine
    from zorse_megatron.doctor.doctor_run import DoctorRun, machine_here
    from zorse_megatron.emulate.rank_jobs import exits_on_signals, run_spawned, runner_here

    def tell(finding: Finding) -> None:
        if not quiet:
            print_plain(str(finding))

    date = datetime.now(UTC).isoformat(timespec="seconds")
    with exits_on_signals(), tempfile.TemporaryDirectory(prefix="zorse-doctor-") as scratch:
        directory = Path(scratch)
        machine = machine_here(run_spawned, directory)
        with runner_here(has_gpu=bool(machine.gpus)) as run_job:
            run = DoctorRun(machine=machine, run_job=run_job, directory=directory, ends_s=ends_s)
            found = tuple(examine(run, checks, tell))
    return Report(version=__version__, date=date, machine=machine, checks=found)
