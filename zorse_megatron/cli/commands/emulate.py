"""`zorse emulate` and `compare`: train on an emulated cluster; compare stock, baselines and
ours.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import (
    Output,
    Tell,
    conflicts,
    progress_shown,
    refuse,
)
from zorse_megatron.cli.gpu_selection import CostsOf, GpuSearches
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    ClusterFile,
    Iterations,
    Margin,
    PlanFile,
    WorkloadOptions,
    answers,
    given_options,
)
from zorse_megatron.cli.perturbed import ExpertLoadText, SlowMachines, with_expert_load
from zorse_megatron.cli.plan_options import UseAll, strategy_named
from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload import Workload
from zorse_megatron.cli.workload_costs import (
    WorkloadCosts,
    costs_for_plan,
    costs_of_workload,
    needed_batch_size,
)
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.read_write import NotWritten
from zorse_megatron.files.wording import duration, figure, part_of, percent
from zorse_megatron.files.writable import folder_problems
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.rank_placement import refuse_other_cluster
from zorse_megatron.launch.training_command import without_layout
from zorse_megatron.plan.divided_replicas import (
    replicas_that_share_experts,
    tp_groups_of,
)
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.schedule.lower import refuse_unsupported

if TYPE_CHECKING:
    from zorse_megatron.emulate.compare import ComparedSystem, ComparisonReport, Planned
    from zorse_megatron.emulate.emulator import EmulatedRun, System
    from zorse_megatron.emulate.tiny_model import TinyTraining
    from zorse_megatron.inputs.model import JobRecompute
    from zorse_megatron.planner.baselines.stock_layouts import Grid
    from zorse_megatron.planner.outcome import Strategy
    from zorse_megatron.simulate.assumptions import Framework, Perturbation
    from zorse_megatron.simulate.result import SimulationResult


MAX_RANKS = 64
"""A workstation does not fit more processes than this."""
NOTE = (
    "the emulation shares its costs with the planner: it validates schedule, order, overlap "
    "and runtime, not the profile"
)


@dataclass(frozen=True, kw_only=True)
class EmulationOptions:
    """How a cluster is emulated."""

    stock: Annotated[
        bool,
        typer.Option(
            "--stock", help="Train with unmodified Megatron in the plan's layout, by its flags."
        ),
    ] = False
    rebalance: Annotated[
        bool,
        typer.Option(
            "--rebalance", help="Let counts of micro-batches follow what ranks take for them."
        ),
    ] = False
    status: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the run's status there, for zorse status."),
    ] = None

    def refuse(self, plan: Plan, source: str) -> None:
        """Raise PlanError or CommandError for a plan that cannot be emulated so."""
        refuse_unsupported(plan, source)
        refuse(self._problems(plan, source), "the plan cannot be emulated")

    def _problems(self, plan: Plan, source: str) -> Iterator[Problem]:
        if plan.world_size > MAX_RANKS:
            yield Problem(
                where=source,
                found=f"{plan.world_size} ranks",
                expected=f"at most {MAX_RANKS}: each is a process on this machine",
                remedy="Emulate a part of the cluster, or use zorse explain.",
            )
        if _divides_both_ways([plan]):
            where, *_ = next(replicas_that_share_experts(plan))
            yield Problem(
                where=f"{source}: {where}.expert_parallel",
                found="it in a plan with tensor-parallel groups",
                expected="one of the two in a plan that is emulated",
                remedy="Use zorse explain, or plan with --max-tp 1.",
            )
        given = {"--rebalance": self.rebalance, "--status": self.status}
        yield from conflicts(
            [name for name, value in given.items() if self.stock and value],
            "--stock",
            remedy="Stock Megatron has no such thing; leave one of them out.",
        )


def _divides_both_ways(plans: Sequence[Plan]) -> bool:
    """Whether there are TP groups, and ranks that share experts alone.

    For these the tiny model has experts, which no TP group of the emulation divides.
    """
    have_tp_groups = any(any(tp_groups_of(plan)) for plan in plans)
    return have_tp_groups and any(any(replicas_that_share_experts(plan)) for plan in plans)


@answers
def emulate(
    *,
    path: PlanFile,
    cluster: ClusterFile,
    given: WorkloadOptions,
    iterations: Iterations = 4,
    slow: SlowMachines,
    expert_load: ExpertLoadText = None,
    emulation: EmulationOptions,
    as_json: bool,
) -> Output:
    """Train with a plan on an emulated cluster, on this machine's CPU."""
    from zorse_megatron.emulate.emulator import emulator

    refuse_without("train", what="zorse emulate")
    plan, flags, source, layout = load_plan(path), given.flags, str(path), None
    if emulation.stock:
        layout, flags = _stock_layout(plan, cluster, flags, source)
    emulation.refuse(plan, source)
    costs = costs_for_plan(
        plan, cluster, given.workload(plan, flags=flags), given.profiles, source=source
    )
    if expert_load is not None:
        costs = with_expert_load(costs, expert_load)
    perturbation, recompute = slow.perturbation(costs), costs.workload.computing.recompute
    system, simulated_costs, framework = _ours(plan, costs, emulation), costs, None
    if layout is not None:
        system, simulated_costs, framework = _stocks(plan, costs, *layout)
        recompute = None  # by its flags
    with progress_shown("simulating", wanted=not as_json) as tell:
        trained = system.plan or system.stock_layout
        assert trained is not None
        predicted = simulated(trained, simulated_costs, source=source, framework=framework)
        training = _tiny(costs, [trained], iterations, recompute)
        with emulator(costs.inputs, training, perturbation=perturbation, tell=tell) as emulated:
            run = emulated.run(system)
    return Output(
        values=_as_json(run, predicted),
        shown=_shown_run(path, run, costs, predicted),
        notes=[NOTE, *costs.notes],
        ok=run.out_of_memory is None,
    )


def _ours(plan: Plan, costs: WorkloadCosts, emulation: EmulationOptions) -> "System":
    """Our runtime under the plan."""
    from zorse_megatron.emulate.emulator import System
    from zorse_megatron.emulate.tiny_model import lora_flags

    status = emulation.status
    flags = (
        *(("--zorse-rebalance", "on") if emulation.rebalance else ()),
        *(("--zorse-status", str(status.absolute())) if status is not None else ()),
        *lora_flags(costs.workload.computing.lora),
    )
    return System(name="plan", gpus=tuple(range(plan.world_size)), plan=plan, flags=flags)


def _stock_layout(
    plan: Plan, cluster: Path, flags: tuple[str, ...] | None, source: str
) -> tuple[tuple["Grid", tuple[int, ...]], tuple[str, ...] | None]:
    """Read a plan as stock's layout, and take what that decides from the training command.

    Raises ZorseError where the plan is no such layout, or the command contradicts it.
    """
    from zorse_megatron.planner.baselines.stock_plans import grid_of_plan, layout_flags

    there = load_cluster(cluster)
    refuse_other_cluster(plan, there, source)
    grid, order = grid_of_plan(plan, [node.ranks for node in there.nodes], source)
    if flags is not None:
        flags = without_layout(flags, layout_flags(grid), is_started=False)
    return (grid, order), flags


def _stocks(
    plan: Plan, costs: WorkloadCosts, grid: "Grid", order: tuple[int, ...]
) -> "tuple[System, WorkloadCosts, Framework]":
    """Unmodified Megatron with the flags of a plan's layout, on the plan's GPUs.

    And what it costs, on GPUs in the order of its ranks. `order`: rank of stock's job -> rank of
    the cluster.
    """
    from zorse_megatron.emulate.emulator import System, flags_of_grid
    from zorse_megatron.planner.baselines.stock_layouts import Placement, plan_of_grid
    from zorse_megatron.planner.baselines.stock_search import framework_of

    nodes = tuple(tuple(some) for _, some in groupby(order, key=costs.inputs.spec.node_of))
    placed = Placement(nodes=nodes).inputs(costs.inputs)
    made, dtype = plan_of_grid(placed, grid), plan.groups[0].compute_dtype
    groups = tuple(replace(group, compute_dtype=dtype) for group in made.groups)
    layout, flags = replace(made, groups=groups), flags_of_grid(placed, grid)
    system = System(name="stock Megatron", gpus=order, flags=flags, stock_layout=layout)
    return system, replace(costs, inputs=placed), framework_of(grid)


def _tiny(
    costs: WorkloadCosts,
    plans: Sequence[Plan],
    iterations: int,
    recompute: "JobRecompute | None" = None,
) -> "TinyTraining":
    """What trains in place of the model; all of these plans can train it."""
    from zorse_megatron.emulate.tiny_model import TinyShape, TinyTraining

    model = costs.workload.model
    return TinyTraining(
        model=model,
        global_batch_size=costs.inputs.global_batch_size,
        iterations=iterations,
        recompute=recompute,
        shape=TinyShape.of(model, plans),
        sequence_parallel=costs.workload.computing.sequence_parallel,
    )


def _shown_run(
    path: Path, run: "EmulatedRun", costs: WorkloadCosts, predicted: "SimulationResult"
) -> Iterator[str | Table]:
    if run.system.plan is None:
        yield (f"unmodified Megatron with {shlex.join(run.system.flags)}")
    if run.out_of_memory is not None:
        yield (f"{path}: out of memory: {run.out_of_memory}")
    else:
        off = round(predicted.iteration_s / run.iteration_s - 1, 4)
        yield (
            f"{path}: one iteration takes {duration(run.iteration_s)}, "
            f"{figure(_tokens(predicted) / run.iteration_s)} tokens/s; simulated: "
            f"{duration(predicted.iteration_s)} ({'+' * (off > 0)}{percent(off)})"
        )
        if "--zorse-rebalance" in run.system.flags:
            yield (f"the last iteration takes {duration(run.iterations_s[-1])}")
        yield _ranks(run, costs)
        yield (f"losses of the tiny model: {', '.join(f'{loss:.4f}' for loss in run.losses)}")


def _tokens(predicted: "SimulationResult") -> float:
    return predicted.tokens_per_s * predicted.iteration_s


def _ranks(run: "EmulatedRun", costs: WorkloadCosts) -> Table:
    table = Table("Rank", "GPU", "Busy", "Peak memory")
    for rank, gpu in enumerate(run.system.gpus):
        peak, capacity = run.peak_bytes[rank], costs.cluster.gpu_of_rank(gpu).memory_bytes
        busy = percent(run.busy_s(rank) / run.iterations_s[-1])
        cells = str(rank), costs.inputs.kinds[gpu], busy, part_of(peak, capacity)
        table.add_row(*map(Text, cells))
    return table


def _as_json(run: "EmulatedRun", predicted: "SimulationResult") -> dict[str, Any]:
    ran = run.out_of_memory is None
    return {
        "ok": ran,
        "out_of_memory": run.out_of_memory,
        "iteration_s": run.iteration_s if ran else None,
        "iterations_s": list(run.iterations_s),
        "tokens_per_s": _tokens(predicted) / run.iteration_s if ran else None,
        "predicted_iteration_s": predicted.iteration_s,
        "losses": list(run.losses),
        "peak_memory_bytes": list(run.peak_bytes),
    }


# `zorse compare`: stock Megatron, the baselines and ours, on one emulated or simulated cluster.


_EMULATED = ("iterations", "jitter", "seed", "slow")
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

    def problems(
        self, context: typer.Context, world_size: int, workload: Workload, out: Path | None
    ) -> Iterator[Problem]:
        """Yield why the comparison cannot be made or written."""
        lora = workload.computing.lora
        if lora is not None and not self.simulated:
            yield Problem(
                where="LoRA",
                found=f"{lora}",
                expected="a job that trains all weights: stock Megatron has no adapters to train",
                remedy="Use zorse compare --simulated, and zorse emulate for the plan.",
            )
        if self.simulated:
            given = given_options(context, _EMULATED)
            yield from conflicts(given, "--simulated", why="it is for what is emulated")
        elif world_size > MAX_RANKS:
            yield Problem(
                where="--cluster",
                found=f"{world_size} GPUs",
                expected=f"at most {MAX_RANKS}: each is a process on this machine",
                remedy="Add --simulated, or describe a smaller cluster of the same kinds.",
            )
        if out is not None:
            from zorse_megatron.emulate.compare import FILES

            yield from folder_problems("--out", out, FILES)
        elif not self.simulated:
            yield Problem(
                where="--out",
                found="no such option",
                expected="a directory for the table, the figures and the page",
                remedy="Such as --out compared; or add --simulated, which prints the table only.",
            )


_AS_IF = "stock Megatron has no LoRA: its rows are what its layouts would take if it had"
ComparisonDirectory = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory for the table, the figures and the page. Needed without --simulated.",
    ),
]


@answers
def compare(
    *,
    cluster: ClusterFile,
    out: ComparisonDirectory = None,
    given: WorkloadOptions,
    margin: Margin = DEFAULT_MARGIN,
    comparison: ComparisonOptions,
    slow: SlowMachines,
    as_json: bool,
) -> Output:
    """Compare stock Megatron and every strategy's plan, trained on an emulated cluster."""
    if not comparison.simulated:
        refuse_without("train", "plots", what="zorse compare")
    elif out is not None:
        refuse_without("plots", what="zorse compare --out")
    strategies = comparison.strategies
    workload = given.workload(dtype_may_be_auto=comparison.simulated)
    batch = needed_batch_size(workload)
    costs_of = partial(
        costs_of_workload, profiles=given.profiles, global_batch_size=batch, margin=margin
    )
    machines = load_cluster(cluster)
    problems = comparison.problems(given.context, machines.world_size, workload, out)
    refuse(problems, "the comparison cannot be made")
    costs, perturbation = costs_of(machines, workload), None
    if not comparison.simulated:
        workload = replace(workload, dtype=costs.dtype)  # one for all, on fewer GPUs too
        perturbation = slow.perturbation(costs)
    planned = partial(_planned, costs, partial(costs_of, workload=workload), comparison.use_all)
    with progress_shown("planning", wanted=not as_json) as tell:
        report = _compared(costs, strategies, planned, perturbation, comparison.iterations, tell)
    written, lost = _saved(report, out)
    return Output(
        values={"dtype": costs.dtype, "rows": report.as_json()},
        shown=[report.title, *report.shown()],
        written=written,
        error=lost,
    )


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
    tell: Tell,
    strategy: "Strategy",
) -> "Planned":
    """Plan as `zorse plan` does. `costs`: of all GPUs."""
    from zorse_megatron.emulate.compare import Planned

    found = GpuSearches(
        costs=costs,
        costs_of=costs_of,
        strategy=strategy,
        on_progress=lambda progress: tell(f"plan of {strategy}: {progress.phase}"),
        may_leave_out=not use_all,
        with_stock=strategy == "zorse",
    ).find()
    return Planned(ranks=found.ranks, outcome=found.outcome, stock=found.stock)


def _compared(  # noqa: PLR0917
    costs: WorkloadCosts,
    strategies: "Sequence[Strategy]",
    planned: "Callable[[Tell, Strategy], Planned]",
    perturbation: "Perturbation | None",
    iterations: int,
    tell: Tell,
) -> "ComparisonReport":
    """`perturbation`: of the emulation; None: what is simulated is not trained."""
    from zorse_megatron.emulate.compare import ComparisonReport, compared_systems
    from zorse_megatron.planner.explanation import adapter_sentences

    inputs, notes = costs.inputs, costs.notes
    if costs.workload.computing.lora is not None:
        notes = (_AS_IF, *adapter_sentences(inputs), *notes)
    found = compared_systems(inputs, strategies, partial(planned, tell))
    if perturbation is None:
        found = [replace(each, is_emulated=False) for each in found]
    else:
        found = _trained(found, costs, perturbation, iterations, tell)
        notes = (NOTE, *notes)
    how = "simulated" if perturbation is None else "emulated"
    title = (
        f"{costs.workload.model.name} on {costs.cluster.name or 'the cluster'}: "
        f"{inputs.world_size} {how} GPUs, {inputs.global_batch_size} samples of "
        f"{inputs.sequence_length} tokens"
    )
    return ComparisonReport.of(found, inputs, title=title, notes=notes)


def _layouts(found: Sequence["ComparedSystem"]) -> list[Plan]:
    systems = [compared.system for compared in found if compared.system is not None]
    layouts = [system.plan or system.stock_layout for system in systems]
    return [plan for plan in layouts if plan is not None]


def emulated_together(found: Sequence["ComparedSystem"]) -> list["ComparedSystem"]:
    """The rows, of which some are not to be emulated where one tiny model cannot be all of them."""
    if not _divides_both_ways(_layouts(found)):
        return list(found)
    reason = "simulated: the emulation has no TP groups beside ranks that share experts"
    return [
        replace(each, system=None, is_emulated=False, reason=each.reason or reason)
        if any(any(tp_groups_of(plan)) for plan in _layouts([each]))
        else each
        for each in found
    ]


def _trained(
    found: Sequence["ComparedSystem"],
    costs: WorkloadCosts,
    perturbation: "Perturbation",
    iterations: int,
    tell: Tell,
) -> list["ComparedSystem"]:
    """Train all systems from the same weights, on the same data; what is equal once."""
    from zorse_megatron.emulate.emulator import EmulatedRun, emulator

    found = emulated_together(found)
    training = _tiny(costs, _layouts(found), iterations)
    runs: dict[object, EmulatedRun] = {}
    results = []
    with emulator(costs.inputs, training, perturbation=perturbation, tell=tell) as emulated:
        tell("drawing initial weights")
        emulated.write_weights()
        for compared in found:
            run = None
            if (system := compared.system) is not None:
                what = (system.gpus, system.flags, system.plan)
                run = runs[what] = runs.get(what) or emulated.run(system)
            results.append(replace(compared, run=run))
    return results
