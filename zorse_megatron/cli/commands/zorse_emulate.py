"""`zorse emulate`: train on an emulated cluster, and report the cluster's iteration time."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import (
    CommandError,
    part_of,
    print_answer,
    reported_errors,
    waiting,
)
from zorse_megatron.cli.options import (
    AsJson,
    ClusterFile,
    Iterations,
    PlanFile,
    WorkloadOptions,
    with_bundles,
)
from zorse_megatron.cli.perturbed import SlowIterations
from zorse_megatron.cli.simulated import simulated
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_for_plan
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.launch.stock_command import without_layout
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.cluster.rank_placement import refuse_other_cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.text.figures import duration, figure, percent

if TYPE_CHECKING:
    from zorse_megatron.emulate.jobs.emulator import EmulatedRun, System
    from zorse_megatron.emulate.jobs.tiny_model import TinyTraining
    from zorse_megatron.planner.baselines.stock_grids import Grid
    from zorse_megatron.simulate.framework import Framework
    from zorse_megatron.simulate.result import SimulationResult


MAX_RANKS = 32
"""A workstation does not fit more processes than this."""
NOTE = (
    "the emulation shares its costs with the planner: it validates schedule, order, overlap "
    "and runtime, not the profile"
)


@dataclass(frozen=True, kw_only=True)
class EmulatedTraining:
    """One job, and what is simulated beside it."""

    costs: WorkloadCosts
    system: "System"
    plan: Plan
    """What is simulated, on GPUs in the order of `simulated_on`."""
    simulated_on: WorkloadCosts
    framework: "Framework | None" = None

    def simulated(self, source: str) -> "SimulationResult":
        """One iteration as the simulator has it."""
        costs, framework = self.simulated_on, self.framework
        return simulated(self.plan, costs, source=source, framework=framework)

    def training(self, iterations: int) -> "TinyTraining":
        """Of the tiny model."""
        from zorse_megatron.emulate.jobs.tiny_model import TinyTraining
        from zorse_megatron.emulate.jobs.tiny_shape import TinyShape

        model, computing = self.costs.workload.model, self.costs.workload.computing
        return TinyTraining(
            model=model,
            global_batch_size=self.plan.global_batch_size,
            iterations=iterations,
            recompute=None if self.system.plan is None else computing.recompute,
            shape=TinyShape.of(model, [self.plan]),
            sequence_parallel=computing.sequence_parallel,
        )


def ours(
    plan: Plan, costs: WorkloadCosts, *, rebalance: bool, status: Path | None
) -> EmulatedTraining:
    """Our runtime under the plan."""
    from zorse_megatron.emulate.jobs.emulator import System

    flags = (
        *(("--zorse-rebalance", "on") if rebalance else ()),
        *(("--zorse-status", str(status.absolute())) if status is not None else ()),
    )
    system = System(name="plan", gpus=tuple(range(plan.world_size)), plan=plan, flags=flags)
    return EmulatedTraining(costs=costs, system=system, plan=plan, simulated_on=costs)


@dataclass(frozen=True, kw_only=True)
class OfStock:
    """A plan read as stock's layout."""

    grid: "Grid"
    order: tuple[int, ...]
    """Rank of stock's job -> rank of the cluster."""

    def job(self, plan: Plan, costs: WorkloadCosts) -> EmulatedTraining:
        """Unmodified Megatron with the layout's flags, on these GPUs."""
        from zorse_megatron.emulate.jobs.emulator import System
        from zorse_megatron.emulate.jobs.stock_flags import flags_of_grid
        from zorse_megatron.planner.baselines.stock_grids import plan_of_grid
        from zorse_megatron.planner.baselines.stock_placements import Placement
        from zorse_megatron.planner.baselines.stock_search import framework_of

        node_of = costs.inputs.spec.node_of
        nodes = tuple(tuple(some) for _, some in groupby(self.order, key=node_of))
        placed = Placement(nodes=nodes).inputs(costs.inputs)
        made = plan_of_grid(placed, self.grid)
        dtype = plan.groups[0].compute_dtype
        layout = replace(
            made, groups=tuple(replace(group, compute_dtype=dtype) for group in made.groups)
        )
        system = System(
            name="stock Megatron",
            gpus=self.order,
            flags=flags_of_grid(placed, self.grid),
            stock_layout=layout,
        )
        return EmulatedTraining(
            costs=costs,
            system=system,
            plan=layout,
            simulated_on=replace(costs, inputs=placed),
            framework=framework_of(self.grid),
        )


def stock_layout(
    plan: Plan, cluster: Path, flags: tuple[str, ...] | None, *, source: str
) -> tuple[OfStock, tuple[str, ...] | None]:
    """Read a plan as stock's layout, and take what that decides from the training command.

    Raises ZorseError where the plan is no such layout, or the command contradicts it.
    """
    from zorse_megatron.planner.baselines.stock_flags import layout_flags
    from zorse_megatron.planner.baselines.stock_plans import grid_of_plan

    there = load_cluster(cluster)
    refuse_other_cluster(plan, there, source)
    grid, order = grid_of_plan(plan, [node.ranks for node in there.nodes], source)
    if flags is not None:
        flags = without_layout(flags, layout_flags(grid), is_started=False)
    return OfStock(grid=grid, order=order), flags


@dataclass(frozen=True, kw_only=True)
class EmulationOptions:
    """How a cluster is emulated."""

    dilation: Annotated[
        float | None,
        typer.Option(
            help="Run in real time: wall-clock seconds per emulated second. Default: as fast as "
            "possible, on a virtual clock."
        ),
    ] = None
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


@with_bundles
def emulate(
    *,
    path: PlanFile,
    cluster: ClusterFile,
    given: WorkloadOptions,
    iterations: Iterations = 4,
    slow: SlowIterations,
    emulation: EmulationOptions,
    as_json: AsJson = False,
) -> None:
    """Train with a plan on an emulated cluster, on this machine's CPU."""
    with reported_errors(as_json=as_json):
        refuse_without("train", what="zorse emulate")
        plan, flags, layout = load_plan(path), given.flags, None
        if emulation.stock:
            layout, flags = stock_layout(plan, cluster, flags, source=str(path))
        refuse_unsupported(plan, str(path))
        workload = given.workload(plan, flags=flags)
        costs = costs_for_plan(plan, cluster, workload, given.profiles, source=str(path))
        _refuse(plan, emulation, str(path))
        perturbation = slow.perturbation(costs)
        with waiting("simulating", wanted=not as_json) as tell:
            if layout is None:
                job = ours(plan, costs, rebalance=emulation.rebalance, status=emulation.status)
            else:
                job = layout.job(plan, costs)
            predicted = job.simulated(str(path))
            run = _run(job, iterations, perturbation, emulation.dilation, tell)
    print_answer(
        _as_json(run, predicted),
        _shown(path, run, costs, predicted),
        notes=[NOTE, *costs.notes],
        as_json=as_json,
    )
    if not run.self_test.is_valid or run.out_of_memory is not None:
        raise typer.Exit(1)


def _run(
    job: EmulatedTraining,
    iterations: int,
    perturbation: Any,
    dilation: float | None,
    tell: Callable[[str], None],
) -> "EmulatedRun":
    from zorse_megatron.emulate.jobs.emulator import emulator

    training = job.training(iterations)
    inputs = job.costs.inputs
    with emulator(
        inputs, training, perturbation=perturbation, dilation=dilation, tell=tell
    ) as emulated:
        return emulated.run(job.system)


def _refuse(plan: Plan, emulation: EmulationOptions, source: str) -> None:
    problems = list(_problems(plan, emulation.dilation, source))
    problems += [
        Problem(
            where=f"--{name}",
            found="it with --stock",
            expected="one of the two",
            remedy="Stock Megatron has no such thing; leave one of them out.",
        )
        for name in ("rebalance", "status")
        if emulation.stock and getattr(emulation, name)
    ]
    if problems:
        raise CommandError("the plan cannot be emulated", problems)


def _problems(plan: Plan, dilation: float | None, source: str) -> Iterator[Problem]:
    if plan.world_size > MAX_RANKS:
        yield Problem(
            where=source,
            found=f"{plan.world_size} ranks",
            expected=f"at most {MAX_RANKS}: each is a process on this machine",
            remedy="Emulate a part of the cluster, or use zorse explain.",
        )
    if dilation is not None and not 0 < dilation < float("inf"):
        yield Problem(
            where="--dilation",
            found=f"{dilation}",
            expected="a number above 0",
            remedy="With 10, one emulated second takes ten seconds on this machine.",
        )


def _shown(
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
    yield (str(run.self_test))
    if run.late_s is not None:
        yield (f"largest lag of this machine: {duration(run.late_s)} of emulated time")


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
        "valid": run.self_test.is_valid,
        "self_test_error": run.self_test.error,
        "out_of_memory": run.out_of_memory,
        "iteration_s": run.iteration_s if ran else None,
        "iterations_s": list(run.iterations_s),
        "tokens_per_s": _tokens(predicted) / run.iteration_s if ran else None,
        "predicted_iteration_s": predicted.iteration_s,
        "losses": list(run.losses),
        "peak_memory_bytes": list(run.peak_bytes),
        "late_s": run.late_s,
    }
