"""`zorse compare`: train stock Megatron, the baselines and ours on one emulated cluster."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.commands.zorse_emulate import MAX_RANKS, NOTE
from zorse_megatron.cli.console import (
    CommandError,
    failure_as_json,
    print_json,
    print_plain,
    print_table,
    reported_errors,
)
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    AsJson,
    ClusterFile,
    DtypeName,
    GlobalBatchSize,
    Iterations,
    Margin,
    Model,
    Profiles,
    SeqLength,
)
from zorse_megatron.cli.perturbed import Jitter, Seed, SlowKind, SlowRank, perturbation_of
from zorse_megatron.cli.progress_display import waiting
from zorse_megatron.cli.workload import Workload, workload_of
from zorse_megatron.cli.workload_costs import (
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.files.write import NotWritten
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster

if TYPE_CHECKING:
    from zorse_megatron.emulate.compare.compared_systems import ComparedSystem
    from zorse_megatron.emulate.compare.comparison import Result
    from zorse_megatron.emulate.compare.comparison_report import ComparisonReport
    from zorse_megatron.planner.inputs.search_inputs import Inputs
    from zorse_megatron.simulate.perturb import Perturbation


def compare(  # noqa: PLR0917
    context: typer.Context,
    cluster: ClusterFile,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the table, the figures and the page.")
    ],
    model: Model = None,
    profile: Profiles = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    dtype: DtypeName = None,
    margin: Margin = DEFAULT_MARGIN,
    iterations: Iterations = 4,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only stock on all GPUs and the zorse plan.")
    ] = False,
    jitter: Jitter = 0.0,
    seed: Seed = 0,
    slow_rank: SlowRank = None,
    slow_kind: SlowKind = None,
    as_json: AsJson = False,
) -> None:
    """Train stock Megatron and every strategy's plan on an emulated cluster, and compare them."""
    with reported_errors(as_json=as_json):
        refuse_without("train", "plots", what="zorse compare")
        workload = workload_of(
            model=model,
            flags=training_flags(context),
            global_batch_size=global_batch_size,
            seq_length=seq_length,
            dtype=dtype,
        )
        batch, machines = needed_batch_size(workload), load_cluster(cluster)
        _refuse(machines, out)
        costs = costs_of_workload(
            machines, workload, profile or [], global_batch_size=batch, margin=margin
        )
        perturbation = perturbation_of(
            machines, jitter=jitter, seed=seed, slow_rank=slow_rank, slow_kind=slow_kind
        )
        with waiting("planning", wanted=not as_json) as tell:
            report = _compared(costs, perturbation, iterations, quick, tell)
        written, lost = _saved(report, out)
    if as_json:
        from zorse_megatron.emulate.compare.comparison import as_json as plain

        answer = {"ok": True, "rows": plain(report.rows), "written": list(map(str, written))}
        print_json(answer | failure_as_json(lost))
    else:
        _print(report, written)
    if lost is not None:
        if not as_json:
            print_plain(str(lost), to_stderr=True)
        raise typer.Exit(1)


def _saved(report: "ComparisonReport", out: Path) -> tuple[Sequence[Path], NotWritten | None]:
    """Write the files; what was measured is shown also where they cannot be written."""
    try:
        return report.save(out), None
    except NotWritten as error:
        return [], error


def _compared(
    costs: WorkloadCosts,
    perturbation: "Perturbation",
    iterations: int,
    quick: bool,
    tell: Callable[[str], None],
) -> "ComparisonReport":
    from zorse_megatron.emulate.compare.compared_systems import compared_systems
    from zorse_megatron.emulate.compare.comparison_report import ComparisonReport

    inputs, workload = costs.inputs, costs.workload
    found = compared_systems(inputs, quick=quick)
    results = _trained(found, inputs, workload, perturbation, iterations, tell)
    title = (
        f"{workload.model.name} on {costs.cluster.name or 'the cluster'}: {inputs.world_size} "
        f"emulated GPUs, {inputs.global_batch_size} samples of {inputs.sequence_length} tokens"
    )
    notes = (NOTE.removeprefix("note: "), *costs.notes)
    return ComparisonReport.of(results, inputs, title=title, notes=notes)


def _trained(  # noqa: PLR0917
    found: Sequence["ComparedSystem"],
    inputs: "Inputs",
    workload: Workload,
    perturbation: "Perturbation",
    iterations: int,
    tell: Callable[[str], None],
) -> list["Result"]:
    """Train all systems from the same weights, on the same data."""
    from zorse_megatron.emulate.compare.comparison import Result
    from zorse_megatron.emulate.jobs.emulator import emulator
    from zorse_megatron.emulate.jobs.tiny_model import TinyTraining
    from zorse_megatron.emulate.jobs.tiny_shape import TinyShape

    systems = [compared.system for compared in found if compared.system is not None]
    layouts = [system.plan or system.stock_layout for system in systems]
    plans = [plan for plan in layouts if plan is not None]
    training = TinyTraining(
        model=workload.model,
        global_batch_size=inputs.global_batch_size,
        iterations=iterations,
        shape=TinyShape.of(workload.model, plans),
        sequence_parallel=workload.computing.sequence_parallel,
    )
    results = []
    with emulator(inputs, training, perturbation=perturbation, tell=tell) as emulated:
        tell("drawing initial weights")
        emulated.write_weights()
        for compared in found:
            run = emulated.run(compared.system) if compared.system is not None else None
            results.append(Result(compared=compared, run=run))
    return results


def _refuse(cluster: Cluster, out: Path) -> None:
    problems = []
    if cluster.world_size > MAX_RANKS:
        problems.append(
            Problem(
                where="--cluster",
                found=f"{cluster.world_size} GPUs",
                expected=f"at most {MAX_RANKS}: each is a process on this machine",
                remedy="Describe a smaller cluster of the same kinds.",
            )
        )
    from zorse_megatron.emulate.compare.comparison_report import FILES

    problems += folder_problems("--out", out, FILES)
    if problems:
        raise CommandError("the comparison cannot be made", problems)


def _print(report: "ComparisonReport", written: Sequence[Path]) -> None:
    from zorse_megatron.emulate.compare.comparison_report import HEADINGS

    print_plain(report.title)
    rows = report.table()
    table = Table(*(each for each in HEADINGS if each != "Layout"))
    for name, _, *cells in rows:
        table.add_row(*map(Text, (name, *cells)))
    print_table(table)
    for name, layout, *_ in rows:
        print_plain(f"{name}: {layout}")
    for note in report.notes:
        print_plain(f"note: {note}")
    if written:
        print_plain(f"written: {', '.join(map(str, written))}")
