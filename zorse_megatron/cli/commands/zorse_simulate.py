"""`zorse simulate`: predict a plan's iteration time and each rank's activity."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zorse_megatron.cli.console import (
    print_json,
    print_plain,
    print_table,
    reported_errors,
)
from zorse_megatron.cli.critical_shares import critical_as_json, critical_lines
from zorse_megatron.cli.options import (
    AsJson,
    ClusterFile,
    Margin,
    PlanFile,
    WorkloadOptions,
    with_bundles,
)
from zorse_megatron.cli.perturbed import SlowMachines
from zorse_megatron.cli.pictures import (
    Pictures,
    refuse_other_formats,
    refuse_without_matplotlib,
    save_pictures,
)
from zorse_megatron.cli.progress_display import waiting
from zorse_megatron.cli.rank_table import rank_table, ranks_as_json
from zorse_megatron.cli.simulated import memory_problems, simulated, types_of
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_for_plan
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.figures import duration, figure

if TYPE_CHECKING:
    from zorse_megatron.simulate.result import SimulationResult


@with_bundles
def simulate(
    *,
    path: PlanFile,
    cluster: ClusterFile,
    given: WorkloadOptions,
    margin: Margin = 0.0,
    timeline: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw each rank's timeline.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    slow: SlowMachines,
    as_json: AsJson = False,
) -> None:
    """Predict a plan's iteration time, tokens/s, and each rank's time and memory."""
    pictures = Pictures(timeline=timeline, trace=trace)
    with reported_errors(as_json=as_json):
        refuse_other_formats(pictures)
        refuse_without_matplotlib(pictures)
        refuse_unwritable(pictures.by_option(), inputs=[path, cluster, *given.inputs])
        plan = load_plan(path)
        costs = costs_for_plan(
            plan, cluster, given.workload(plan), given.profiles, source=str(path), margin=margin
        )
        perturbation = slow.perturbation(costs)
        with waiting("simulating", wanted=not as_json) as tell:
            result = simulated(plan, costs, source=str(path), perturbation=perturbation)
            tell("drawing")
            written = save_pictures(pictures, plan, result, title=_title(path, result))
    problems = list(memory_problems(plan, result, costs.cluster, str(path), margin=margin))
    if as_json:
        answer = _as_json(plan, costs, result)
        paths = [str(each) for each in written]
        print_json({**answer, "fits_in_memory": not problems, "written": paths})
        return
    _print(path, plan, costs, result)
    for problem in problems:
        print_plain(f"does not fit: {problem}")
    for each in written:
        print_plain(f"written: {each}")


def _print(path: Path, plan: Plan, costs: WorkloadCosts, result: "SimulationResult") -> None:
    samples = number_of(plan.global_batch_size, "sample")
    print_plain(
        f"{path}: one iteration takes {duration(result.iteration_s)}: "
        f"{figure(result.tokens_per_s)} tokens/s ({samples} of {costs.inputs.sequence_length} "
        f"tokens, {types_of(plan, costs)})"
    )
    print_table(rank_table(plan, result, costs.cluster))
    for line in critical_lines(plan, result):
        print_plain(line)
    for note in costs.notes:
        print_plain(f"note: {note}")


def _as_json(plan: Plan, costs: WorkloadCosts, result: "SimulationResult") -> dict[str, Any]:
    return {
        "ok": True,
        "iteration_s": result.iteration_s,
        "tokens_per_s": result.tokens_per_s,
        "dtype": costs.dtype,
        "ranks": ranks_as_json(plan, result, costs.cluster),
        "critical_path": critical_as_json(plan, result),
        "notes": list(costs.notes),
    }


def _title(path: Path, result: "SimulationResult") -> str:
    return f"{path.name}: {duration(result.iteration_s)}, {figure(result.tokens_per_s)} tokens/s"
