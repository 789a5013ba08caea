"""`zorse compare`: stock Megatron, the baselines and ours, on one emulated or simulated cluster."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.commands.zorse_emulate import MAX_RANKS, NOTE
from zorse_megatron.cli.console import (
    CommandError,
    failure_as_json,
    print_answer,
    print_plain,
    reported_errors,
    waiting,
)
from zorse_megatron.cli.gpu_selection import CostsOf, find
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    AsJson,
    ClusterFile,
    Iterations,
    Margin,
    PlannedWorkload,
    is_given,
    with_bundles,
)
from zorse_megatron.cli.perturbed import SlowGpus
from zorse_megatron.cli.plan_options import UseAll, strategy_named
from zorse_megatron.cli.workload_costs import (
    WorkloadCosts,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.files.write import NotWritten
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster

if TYPE_CHECKING:
    from zorse_megatron.emulate.compare.compared_systems import ComparedSystem, Planned
    from zorse_megatron.emulate.compare.comparison import Result
    from zorse_megatron.emulate.compare.comparison_report import ComparisonReport
    from zorse_megatron.planner.outcome import Strategy
    from zorse_megatron.simulate.perturb import Perturbation

_EMULATED = ("iterations", "jitter", "seed", "slow_rank", "slow_kind")
"""Options of what trains."""


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """What is compared, and where."""

    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated",
            help="Compare in the simulator: any number of GPUs, nothing is trained.",
        ),
    ] = False
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only this strategy; repeatable. Default: all.")
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="The same as --strategy stock --strategy zorse.")
    ] = False
    use_all: UseAll = False
    iterations: Iterations = 4

    @property
    def strategies(self) -> "list[Strategy]":
        """Raises CommandError for one that there is not."""
        from zorse_megatron.planner.outcome import STRATEGIES

        named = [*(self.strategy or ()), *(("stock", "zorse") if self.quick else ())]
        return [strategy_named(name) for name in named or STRATEGIES]


ComparisonDirectory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory for the table, the figures and the page. Needed without --simulated.",
    ),
]


@with_bundles
def compare(
    *,
    cluster: ClusterFile,
    out: ComparisonDirectory = None,
    given: PlannedWorkload,
    margin: Margin = DEFAULT_MARGIN,
    comparison: ComparisonOptions,
    slow: SlowGpus,
    as_json: AsJson = False,
) -> None:
    """Compare stock Megatron and every strategy's plan, trained on an emulated cluster."""
    with reported_errors(as_json=as_json):
        _refuse_without_extras(comparison, out)
        strategies = comparison.strategies
        workload = given.workload(dtype_may_be_auto=comparison.simulated)
        batch = needed_batch_size(workload)
        costs_of = partial(
            costs_of_workload, profiles=given.profiles, global_batch_size=batch, margin=margin
        )
        machines = load_cluster(cluster)
        _refuse(given.context, machines.world_size, out, simulated=comparison.simulated)
        costs, perturbation = costs_of(machines, workload), None
        if not comparison.simulated:
            workload = replace(workload, dtype=costs.dtype)  # one for all, on fewer GPUs too
            perturbation = slow.perturbation(costs)
        planned = partial(_planned, costs, partial(costs_of, workload=workload), comparison.use_all)
        with waiting("planning", wanted=not as_json) as tell:
            report = _compared(
                costs, strategies, planned, perturbation, comparison.iterations, tell
            )
        written, lost = _saved(report, out)
    values = {"dtype": costs.dtype, "rows": report.as_json(), **failure_as_json(lost)}
    print_answer(values, _shown(report), written=written, as_json=as_json)
    if lost is not None:
        if not as_json:
            print_plain(str(lost), to_stderr=True)
        raise typer.Exit(1)


def _refuse_without_extras(comparison: ComparisonOptions, out: Path | None) -> None:
    if not comparison.simulated:
        refuse_without("train", "plots", what="zorse compare")
    elif out is not None:
        refuse_without("plots", what="zorse compare --out")


def _saved(report: "ComparisonReport", out: Path | None) -> tuple[list[Path], NotWritten | None]:
    """Write the files; what was compared is shown also where they cannot be written."""
    try:
        return ([] if out is None else report.save(out)), None
    except NotWritten as error:
        return [], error


def _planned(
    costs: WorkloadCosts,
    costs_of: CostsOf,
    use_all: bool,
    tell: Callable[[str], None],
    strategy: "Strategy",
) -> "Planned":
    """Plan as `zorse plan` does. `costs`: of all GPUs."""
    from zorse_megatron.emulate.compare.compared_systems import Planned

    found = find(
        costs,
        costs_of,
        strategy,
        lambda progress: tell(f"plan of {strategy}: {progress.phase}"),
        may_leave_out=not use_all,
        with_stock=strategy == "zorse",
    )
    return Planned(
        ranks=found.ranks,
        outcome=found.outcome,
        stock=None if found.stock is None else found.stock.at_best,
    )


def _compared(  # noqa: PLR0917
    costs: WorkloadCosts,
    strategies: "Sequence[Strategy]",
    planned: "Callable[[Callable[[str], None], Strategy], Planned]",
    perturbation: "Perturbation | None",
    iterations: int,
    tell: Callable[[str], None],
) -> "ComparisonReport":
    """`perturbation`: of the emulation; None: what is simulated is not trained."""
    from zorse_megatron.emulate.compare.compared_systems import compared_systems
    from zorse_megatron.emulate.compare.comparison import Result
    from zorse_megatron.emulate.compare.comparison_report import ComparisonReport

    inputs, notes = costs.inputs, costs.notes
    found = compared_systems(inputs, strategies, partial(planned, tell))
    if perturbation is None:
        results = [Result(compared=each, is_emulated=False) for each in found]
    else:
        results = _trained(found, costs, perturbation, iterations, tell)
        notes = (NOTE, *notes)
    how = "simulated" if perturbation is None else "emulated"
    title = (
        f"{costs.workload.model.name} on {costs.cluster.name or 'the cluster'}: "
        f"{inputs.world_size} {how} GPUs, {inputs.global_batch_size} samples of "
        f"{inputs.sequence_length} tokens"
    )
    return ComparisonReport.of(results, inputs, title=title, notes=notes)


def _trained(
    found: Sequence["ComparedSystem"],
    costs: WorkloadCosts,
    perturbation: "Perturbation",
    iterations: int,
    tell: Callable[[str], None],
) -> list["Result"]:
    """Train all systems from the same weights, on the same data; what is equal once."""
    from zorse_megatron.emulate.compare.comparison import Result
    from zorse_megatron.emulate.jobs.emulator import EmulatedRun, emulator
    from zorse_megatron.emulate.jobs.tiny_model import TinyTraining
    from zorse_megatron.emulate.jobs.tiny_shape import TinyShape

    inputs, workload = costs.inputs, costs.workload
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
    runs: dict[object, EmulatedRun] = {}
    results = []
    with emulator(inputs, training, perturbation=perturbation, tell=tell) as emulated:
        tell("drawing initial weights")
        emulated.write_weights()
        for compared in found:
            run = None
            if (system := compared.system) is not None:
                what = (system.gpus, system.flags, system.plan)
                run = runs[what] = runs.get(what) or emulated.run(system)
            results.append(Result(compared=compared, run=run))
    return results


def _refuse(context: typer.Context, world_size: int, out: Path | None, *, simulated: bool) -> None:
    problems = list(_problems(context, world_size, out, simulated=simulated))
    if problems:
        raise CommandError("the comparison cannot be made", problems)


def _problems(
    context: typer.Context, world_size: int, out: Path | None, *, simulated: bool
) -> Iterator[Problem]:
    if simulated:
        for option in (
            f"--{name.replace('_', '-')}" for name in _EMULATED if is_given(context, name)
        ):
            yield Problem(
                where=option,
                found="it and --simulated",
                expected="one of the two: it is for what is emulated",
                remedy=f"Leave {option} or --simulated out.",
            )
    elif world_size > MAX_RANKS:
        yield Problem(
            where="--cluster",
            found=f"{world_size} GPUs",
            expected=f"at most {MAX_RANKS}: each is a process on this machine",
            remedy="Add --simulated, or describe a smaller cluster of the same kinds.",
        )
    if out is not None:
        from zorse_megatron.emulate.compare.comparison_report import FILES

        yield from folder_problems("--out", out, FILES)
    elif not simulated:
        yield Problem(
            where="--out",
            found="no such option",
            expected="a directory for the table, the figures and the page",
            remedy="Such as --out compared; or add --simulated, which prints the table only.",
        )


def _shown(report: "ComparisonReport") -> Iterator[str | Table]:
    yield report.title
    rows = report.table()
    table = Table(*(each for each in report.headings if each != "Layout"))
    for name, _, *cells in rows:
        table.add_row(*map(Text, (name, *cells)))
    yield table
    yield from (f"{name}: {layout}" for name, layout, *_ in rows if layout != "-")
    yield from (f"note: {note}" for note in report.notes)
