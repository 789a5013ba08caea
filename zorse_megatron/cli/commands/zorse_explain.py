"""`zorse explain`: bottleneck, alternatives and possible improvements of a plan."""

from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.console import gib, print_json, print_plain, print_table, reported_errors
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    AsJson,
    ClusterFile,
    Margin,
    PlanFile,
    WorkloadOptions,
    with_bundles,
)
from zorse_megatron.cli.progress_display import progress_bar, waiting
from zorse_megatron.cli.simulated import refuse_too_many_micro_batches
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_for_plan
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.plan.spans import spans_of, spell
from zorse_megatron.schema.text.strict import plain

if TYPE_CHECKING:
    from zorse_megatron.planner.explain.explanation import Explanation, Headroom
    from zorse_megatron.planner.explain.replan import Replans


@with_bundles
def explain(
    *,
    path: PlanFile,
    cluster: ClusterFile,
    given: WorkloadOptions,
    margin: Margin = DEFAULT_MARGIN,
    no_replan: Annotated[
        bool,
        typer.Option(
            "--no-replan",
            help="Skip the searches for a better plan, and with one GPU, node or region more or "
            "less.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: its bottleneck, memory headroom, rejected alternatives, what would help."""
    with reported_errors(as_json=as_json):
        from zorse_megatron.planner.baselines import stock_best
        from zorse_megatron.planner.explain.analysis import explain as explained

        plan = load_plan(path)
        refuse_too_many_micro_batches(plan, str(path))
        costs = costs_for_plan(
            plan, cluster, given.workload(plan), given.profiles, source=str(path), margin=margin
        )
        searched = None if no_replan else _replans(costs, shows_progress=not as_json)
        stock, notes = None, list(costs.notes)
        if plan.world_size > stock_best.MOST_GPUS:
            notes.append(f"stock Megatron: not computed for more than {stock_best.MOST_GPUS} GPUs")
        else:
            with waiting("stock's layouts", wanted=not as_json):
                stock = stock_best.stock_at_best(costs.inputs)
        explanation = explained(costs.inputs, plan, searched, stock)
    if as_json:
        print_json({"ok": True, **plain(explanation), "dtype": costs.dtype, "notes": notes})
        return
    for sentence in explanation.sentences:
        print_plain(sentence)
    print_table(_loads(plan, explanation))
    print_table(_headroom(plan, explanation))
    for note in notes:
        print_plain(f"note: {note}")


def _replans(costs: WorkloadCosts, *, shows_progress: bool) -> "Replans | None":
    """Search again; None where there is no plan, as a plan that does not fit is explained too."""
    from zorse_megatron.planner.explain.replan import replan
    from zorse_megatron.planner.planner_errors import NoPlanError

    with progress_bar(wanted=shows_progress) as on_progress:
        try:
            return replan(costs.inputs, on_progress=on_progress)
        except NoPlanError:
            return None


def _loads(plan: Plan, explanation: "Explanation") -> Table:
    table = Table("Group", "GPUs", "Layers", "Busy", "Communication", "Waiting")
    for load in explanation.loads:
        name = f"{load.group} {plan.groups[load.group].name or ''}".strip()
        gpus = ", ".join(f"{count} x {kind}" for kind, count in load.kinds)
        shares = [f"{100 * s:.0f} %" for s in (load.busy, load.communication, load.waiting)]
        table.add_row(*map(Text, [name, gpus, str(load.num_layers), *shares]))
    return table


def _headroom(plan: Plan, explanation: "Explanation") -> Table:
    """One row for the ranks of a group that have the same to spare."""
    alike: dict[tuple[int, str, str], list[Headroom]] = defaultdict(list)
    for each in explanation.headroom:
        key = plan.group_of_rank(each.rank), each.kind, gib(each.peak_bytes)
        alike[key].append(each)
    table = Table("Ranks", "GPU", "Peak memory", "Usable", "Free")
    for (_, kind, peak), members in alike.items():
        one = members[0]
        free = gib(abs(one.free_bytes))
        table.add_row(
            spell(spans_of(each.rank for each in members)),
            Text(kind),
            peak,
            gib(one.capacity_bytes),
            free if one.free_bytes >= 0 else f"{free} too much",
        )
    return table
