"""`zorse emulate`: train on an emulated cluster, and report the cluster's iteration time."""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import (
    CommandError,
    part_of,
    print_json,
    print_plain,
    print_table,
    reported_errors,
)
from zorse_megatron.cli.emulated_training import EmulatedTraining, ours, stock_layout
from zorse_megatron.cli.options import (
    AsJson,
    ClusterFile,
    Iterations,
    PlanFile,
    WorkloadOptions,
    with_bundles,
)
from zorse_megatron.cli.perturbed import SlowIterations
from zorse_megatron.cli.progress_display import waiting
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_for_plan
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.text.figures import duration, figure, percent

if TYPE_CHECKING:
    from zorse_megatron.emulate.jobs.emulator import EmulatedRun
    from zorse_megatron.simulate.result import SimulationResult

MAX_RANKS = 32
"""A workstation does not fit more processes than this."""
NOTE = (
    "note: the emulation shares its costs with the planner: it validates schedule, order, overlap "
    "and runtime, not the profile"
)


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
    if as_json:
        print_json(_as_json(run, costs, predicted))
    else:
        _print(path, run, costs, predicted)
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


def _print(
    path: Path, run: "EmulatedRun", costs: WorkloadCosts, predicted: "SimulationResult"
) -> None:
    if run.system.plan is None:
        print_plain(f"unmodified Megatron with {shlex.join(run.system.flags)}")
    if run.out_of_memory is not None:
        print_plain(f"{path}: out of memory: {run.out_of_memory}")
    else:
        off = round(predicted.iteration_s / run.iteration_s - 1, 4)
        print_plain(
            f"{path}: one iteration takes {duration(run.iteration_s)}, "
            f"{figure(_tokens(predicted) / run.iteration_s)} tokens/s; simulated: "
            f"{duration(predicted.iteration_s)} ({'+' * (off > 0)}{percent(off)})"
        )
        if "--zorse-rebalance" in run.system.flags:
            print_plain(f"the last iteration takes {duration(run.iterations_s[-1])}")
        print_table(_ranks(run, costs))
        print_plain(f"losses of the tiny model: {', '.join(f'{loss:.4f}' for loss in run.losses)}")
    print_plain(str(run.self_test))
    if run.late_s is not None:
        print_plain(f"largest lag of this machine: {duration(run.late_s)} of emulated time")
    print_plain(NOTE)
    for note in costs.notes:
        print_plain(f"note: {note}")


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


def _as_json(
    run: "EmulatedRun", costs: WorkloadCosts, predicted: "SimulationResult"
) -> dict[str, Any]:
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
        "notes": [NOTE.removeprefix("note: "), *costs.notes],
    }
