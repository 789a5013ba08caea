"""`zorse profile`: measure, correct and show profiles."""

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.table import Table as Grid
from rich.text import Text

from zorse_megatron.cli.command_group import AnswersInJson, TakesTrainingFlags, training_flags
from zorse_megatron.cli.commands.zorse_discover import Again, as_ranks
from zorse_megatron.cli.console import (
    print_answer,
    refusal,
    reported_errors,
)
from zorse_megatron.cli.from_status import observed_run
from zorse_megatron.cli.options import AsJson, ClusterFile, DtypeName, Model, SeqLength
from zorse_megatron.cli.workload import Workload, workload_of
from zorse_megatron.costs.curve import Replaced, fit_curve
from zorse_megatron.costs.unlikely import unlikely_times
from zorse_megatron.errors import FlagError
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.files.write import write_text
from zorse_megatron.flags.check import check_command
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.scan import split_script
from zorse_megatron.measure.tasks import single_layer_flags
from zorse_megatron.schema.cluster.cluster_yaml import CLUSTER_FILE, dump_cluster, parse_cluster
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.profile.profile import Profile, Times
from zorse_megatron.schema.profile.profile_json import load_profile, save_profile
from zorse_megatron.schema.status.status import RUNNING_PLAN_NAME
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.strict import read_file

if TYPE_CHECKING:
    from zorse_megatron.measure.on_ranks.profile_run import Profiled


profile = typer.Typer(
    cls=AnswersInJson,
    no_args_is_help=True,
    help="Measure, correct and show profiles of layer times and memory.",
)
# Below this a correction is the rounding of a fall between two points.
_SMALL_CHANGE = 0.005


_LARGEST_SIZE = 64
# Passes are timed nine times, of micro-batches that double: two minutes on a GPU.
_TIME_LIMIT_S = 1.0


@profile.command("measure", cls=TakesTrainingFlags)
def measure_profile(  # noqa: PLR0917
    context: typer.Context,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="YAML",
            help="The cluster file, whose GPUs the ranks must have. Without it any GPUs are "
            "measured, and of those that are not well known what a cluster file has to say.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--out", metavar="JSON", help="Write the profile here, or add to it."),
    ] = Path("profile.json"),
    max_micro_batch: Annotated[
        int, typer.Option(min=1, max=65536, help="Largest micro-batch size to time.")
    ] = _LARGEST_SIZE,
    time_limit: Annotated[
        float,
        typer.Option(min=0, help="Stop growing micro-batches once one takes this many seconds."),
    ] = _TIME_LIMIT_S,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Time the layers of a training command: forward, backward and optimizer step.

    On one GPU start it as it is; on a cluster with srun or torchrun, one rank per GPU of the
    cluster file. One rank measures for each kind of GPU, doubling the micro-batch until it reaches
    the memory or a limit.
    """
    with reported_errors(as_json=as_json):
        refuse_unwritable(
            {"--out": output}, inputs=[cluster] if cluster else [], may_be_stream=False
        )
        workload, (script, flags) = _workload(context)
    with as_ranks("profile", messages_on_gpu=False, as_json=as_json) as (launched, show):
        from zorse_megatron.measure.on_ranks.profile_run import ProfileRun
        from zorse_megatron.measure.on_ranks.profile_run import measure_profile as measure

        assert workload.dtype is not None and workload.dtype != "auto"  # flags always say one
        wanted = ProfileRun(
            cluster=cluster,
            output=output,
            script=script,
            flags=flags,
            shape=workload.model,
            dtype=workload.dtype,
            again=again,
            largest_size=min(max_micro_batch, workload.global_batch_size or max_micro_batch),
            time_limit_s=time_limit,
        )
        found = measure(launched, wanted, show)
    if launched.rank == 0:
        _say(output, found, as_json=as_json)


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


def _say(output: Path, found: "Profiled", *, as_json: bool) -> None:
    from zorse_megatron.measure.results.cluster_text import kind_entry

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
    print_answer(values, shown, as_json=as_json)


@profile.command(cls=TakesTrainingFlags)
def correct(  # noqa: PLR0917
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="What the plan was made from.")],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="What the run has as --zorse-status.")
    ],
    cluster: ClusterFile,
    out: Annotated[Path, typer.Option(metavar="PROFILE", help="Write the profile here.")],
    cluster_out: Annotated[
        Path, typer.Option(metavar="YAML", help="Write the cluster file with such kinds here.")
    ],
    model: Model = None,
    seq_length: SeqLength = None,
    dtype: DtypeName = None,
    as_json: AsJson = False,
) -> None:
    """Scale the times of GPUs by what a run took: one that differs becomes a kind of its own.

    The run is compared with its plan as the profile has it, as by zorse plan --from-status.
    """
    with reported_errors(as_json=as_json):
        refuse_unwritable(
            {"--out": out, "--cluster-out": cluster_out}, inputs=[path, directory, cluster]
        )
        run = observed_run(
            directory,
            read_file(cluster, CLUSTER_FILE),
            workload_of(
                model=model,
                flags=training_flags(context),
                seq_length=seq_length,
                dtype=dtype,
                plan=load_plan(directory / RUNNING_PLAN_NAME),
            ),
            [path],
            margin=0.0,
            source=str(cluster),
        )
        text = dump_cluster(run.speeds.cluster, header=run.origin)
        parse_cluster(text.encode(), source="the cluster file that was to be written")
        assert run.speeds.profile is not None
        save_profile(run.speeds.profile, out)
        write_text(cluster_out, text)
    print_answer(
        {
            "profile": str(out),
            "cluster": str(cluster_out),
            "kinds": run.speeds.kinds,
            "factors": run.factors,
        },
        [f"{out}, {cluster_out}: {', '.join(run.slower_ranks()) or 'nothing to correct'}"],
        as_json=as_json,
    )


@profile.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="PROFILE", help="The profile file.")],
    as_json: AsJson = False,
) -> None:
    """Summarize a profile, and list the measured points that the fitted curves replace."""
    with reported_errors(as_json=as_json):
        loaded = load_profile(path)
    summary = _summary(loaded)
    grid = Grid("GPU", "Models", "Sequence lengths", "Dtypes", "Series", "Points")
    for kind, facts in summary["gpu_kinds"].items():
        cells = [", ".join(map(str, facts[key])) for key in ("models", "seq_lengths", "dtypes")]
        grid.add_row(*map(Text, [kind, *cells, str(facts["series"]), str(facts["points"])]))
    shown: list[str | Grid] = [
        f"{path}: {counts_of(loaded)}",
        grid,
        *map(_sentence, summary["not_believed"]),
        *(f"unlikely: {each}" for each in summary["unlikely"]),
    ]
    print_answer(summary, shown, as_json=as_json)


def counts_of(loaded: Profile) -> str:
    messages = f", {len(loaded.transfers)} series of messages" if loaded.transfers else ""
    return (
        f"{len(loaded.times)} series of times on "
        f"{number_of(len(loaded.gpu_kinds()), 'kind of GPU', 'kinds of GPU')}, "
        f"{number_of(len(loaded.updates), 'optimizer step')}, "
        f"{number_of(len(loaded.memory), 'memory entry', 'memory entries')}, "
        f"{number_of(len(loaded.links), 'link')}{messages}"
    )


def _summary(loaded: Profile) -> dict[str, Any]:
    by_kind: dict[str, list[Times]] = defaultdict(list)
    for times in loaded.times:
        by_kind[times.gpu_kind].append(times)
    return {
        "sources": [dataclasses.asdict(source) for source in loaded.sources],
        "gpu_kinds": {
            kind: {
                "models": list(dict.fromkeys(times.model for times in entries)),
                "seq_lengths": sorted({times.seq_length for times in entries}),
                "dtypes": sorted({times.dtype for times in entries}),
                "series": len(entries),
                "points": sum(len(times.micro_batch_sizes) for times in entries),
            }
            for kind, entries in by_kind.items()
        },
        "unlikely": list(unlikely_times(loaded, GPU_KINDS)),
        "not_believed": [entry for times in loaded.times for entry in _not_believed(times)],
    }


def _not_believed(times: Times) -> list[dict[str, Any]]:
    entries = []
    for direction in ("forward", "backward"):
        _, points = fit_curve(times.micro_batch_sizes, getattr(times, f"{direction}_s"))
        entries += [
            {
                "gpu_kind": times.gpu_kind,
                "model": times.model,
                "seq_length": times.seq_length,
                "dtype": times.dtype,
                "tensor_parallel": times.tensor_parallel,
                "part": times.part,
                "direction": direction,
                **dataclasses.asdict(point),
            }
            for point in points
            if _is_large(point)
        ]
    return entries


def _is_large(point: Replaced) -> bool:
    return abs(point.used_s - point.measured_s) > _SMALL_CHANGE * point.used_s


def _sentence(entry: dict[str, Any]) -> str:
    return (
        f"replaced: {entry['gpu_kind']}, {entry['model']} at sequence length "
        f"{entry['seq_length']} in {entry['dtype']}, tensor parallel {entry['tensor_parallel']}, "
        f"{entry['part']} {entry['direction']}, micro-batch {entry['micro_batch_size']}: "
        f"{1e3 * entry['measured_s']:.3f} ms, used {1e3 * entry['used_s']:.3f} ms"
    )
