"""`zorse profile measure`: time the layers of a training command on each kind of GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import CommandError, print_json, print_plain, reported_errors
from zorse_megatron.cli.measuring import Again, as_ranks
from zorse_megatron.cli.options import AsJson
from zorse_megatron.cli.workload import Workload, workload_of
from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.flags.check import check_command
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.scan import split_script
from zorse_megatron.measure.tasks import single_layer_flags

if TYPE_CHECKING:
    from zorse_megatron.measure.on_ranks.profile_run import Profiled

_LARGEST_SIZE = 64
# Passes are timed nine times, of micro-batches that double: two minutes on a GPU.
_TIME_LIMIT_S = 1.0


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
        problem = Problem(
            where="--",
            found="no training command",
            expected="a training command's flags after --",
            remedy="Such as: zorse profile measure -- --num-layers 32 ...",
        )
        raise CommandError("the command cannot be run", [problem])
    name, flags = split_script(command)
    script = None if name is None else Path(name)
    if script is not None and not script.is_file():
        problem = Problem(
            where=str(script),
            found="no such file",
            expected="your training script: it builds the layers",
            remedy="Correct the path, or omit it to build Megatron's GPT layers.",
        )
        raise CommandError("the command cannot be run", [problem])
    workload = workload_of(model=None, flags=flags, checks_flags=False)
    # Of the command that measures: it leaves out what a plan decides.
    words = [*([] if script is None else [str(script)]), *single_layer_flags(flags, workload.model)]
    if problems := check_command(read_command(words), None):
        raise FlagError("no plan trains these layers", problems)
    return workload, (script, flags)


def _say(output: Path, found: "Profiled", *, as_json: bool) -> None:
    from zorse_megatron.measure.results.cluster_text import kind_entry

    entries = [kind_entry(kind, rates) for kind, rates in found.rates.items()]
    if as_json:
        print_json(
            {
                "ok": True,
                "profile": str(output),
                "measured": found.num_measured,
                "measured_kinds": list(found.measured_kinds),
                "known_kinds": list(found.known_kinds),
                "gpu_kinds": entries,
            }
        )
        return
    print_plain(f"{output}: {found.num_measured} micro-batches and steps measured")
    for kind in found.measured_kinds:
        print_plain(f"  {kind}: measured")
    for kind in found.known_kinds:
        print_plain(f"  {kind}: measured already; --again repeats it")
    if entries:
        print_plain(f"not well known, so for the cluster file: {', '.join(found.rates)}")
        text = yaml.safe_dump({"gpu_kinds": entries}, sort_keys=False, allow_unicode=True)
        print_plain(text.rstrip())
