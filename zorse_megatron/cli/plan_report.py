"""`zorse plan --html`: plan, reasons, best stock layout and gains of more GPUs on one page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import gib
from zorse_megatron.cli.plan_table import memory_saved_by, plan_line
from zorse_megatron.cli.progress_display import progress_bar
from zorse_megatron.cli.simulated import capacities_bytes, simulated, types_of
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spell
from zorse_megatron.schema.text.figures import duration, figure, percent

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import Stock
    from zorse_megatron.planner.explain.explanation import Explanation
    from zorse_megatron.planner.explain.replan import Replans
    from zorse_megatron.planner.outcome import Outcome
    from zorse_megatron.plots.report_page import Card, Picture, PlanPage, ReplanRow, StrategyRow

_HEADINGS = (
    *("Group", "GPUs", "Layers", "Micro-batches", "Memory saved by"),
    *("Busy", "Communication", "Waiting"),
)


def plan_page(
    costs: WorkloadCosts, outcome: "Outcome", notes: Sequence[str], *, shows_progress: bool
) -> str:
    """Return the page. Searches once more for each kind of GPU, below 256 of them."""
    from zorse_megatron.planner.baselines.stock_best import stock_on_all, stock_on_best
    from zorse_megatron.planner.explain.analysis import explain
    from zorse_megatron.planner.explain.replan import replan

    with progress_bar(wanted=shows_progress, title="page") as on_progress:
        replans = replan(costs.inputs, found_s=outcome.iteration_s, on_progress=on_progress)
    stocks = (
        ("Stock Megatron, best even layout on all GPUs", stock_on_all(costs.inputs)),
        ("Stock Megatron, best even layout on fewer", stock_on_best(costs.inputs)),
    )
    explanation = explain(costs.inputs, outcome.plan)
    page = _page(costs, outcome, explanation, replans, stocks, notes)
    return page.html()


def _page(  # noqa: PLR0917
    costs: WorkloadCosts,
    outcome: "Outcome",
    explanation: "Explanation",
    replans: "Replans | None",
    stocks: Sequence[tuple[str, "Stock"]],
    notes: Sequence[str],
) -> "PlanPage":
    from zorse_megatron.planner.explain.replan import MOST_GPUS
    from zorse_megatron.plots.report_page import PlanPage

    plan, inputs, counts = outcome.plan, costs.inputs, outcome.considered
    return PlanPage(
        title=f"{costs.workload.model.name} on {costs.cluster.name or 'the cluster'}",
        subtitle=(
            f"{_gpus(inputs.kinds)}; {inputs.global_batch_size} samples of "
            f"{inputs.sequence_length:,} tokens an iteration, {types_of(plan, costs)}"
        ),
        cards=tuple(_cards(costs, outcome, explanation, stocks)),
        contest=tuple(_contest(outcome, costs, stocks)),
        plan_line=plan_line(plan),
        group_headings=_HEADINGS,
        groups=tuple(_groups(plan, explanation)),
        reasons=explanation.sentences,
        pictures=tuple(_pictures(costs, plan)),
        replans=tuple(_replan_rows(replans)),
        no_replans=(
            f"Not searched: from {MOST_GPUS} GPUs on, each search takes too long."
            if replans is None
            else "No larger cluster has a plan that fits."
        ),
        rejected=tuple((each.what, each.why) for each in outcome.rejected),
        considered=(
            f"The best of each other structure, among {counts.groupings:,} groupings, "
            f"{counts.estimated:,} candidates estimated and {counts.simulated:,} simulated."
        ),
        notes=notes,
        footer=(
            "Predicted by zorse-megatron's simulator, which executes the ranks' own lists of "
            "actions. Not measured."
        ),
    )


def _gpus(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _cards(
    costs: WorkloadCosts,
    outcome: "Outcome",
    explanation: "Explanation",
    stocks: Sequence[tuple[str, "Stock"]],
) -> Iterator["Card"]:
    from zorse_megatron.planner.explain.error_bar import error_bar
    from zorse_megatron.plots.report_page import Card

    bar = error_bar(costs.inputs, num_groups=len(outcome.plan.groups))
    yield Card(
        label="One iteration",
        value=duration(outcome.iteration_s),
        note=f"{figure(outcome.tokens_per_s)} tokens/s, ± {percent(bar.share)} ({bar.basis})",
    )
    fitting = [stock.fitting for _, stock in stocks if stock.fitting is not None]
    best_s = min((each.iteration_s for each in fitting), default=None)
    yield Card(
        label="Against stock's best even layout",
        value="-" if best_s is None else f"{figure(best_s / outcome.iteration_s)} x",
        note="none fits" if best_s is None else f"it takes {duration(best_s)}",
    )
    yield Card(
        label="Of the upper bound on throughput",
        value=percent(outcome.efficiency),
        note=f"no plan takes less than {duration(outcome.bound_s)}",
    )
    tightest = min(explanation.headroom, key=lambda each: each.free_bytes)
    yield Card(
        label="Fullest GPU",
        value=percent(outcome.peak_memory_fraction),
        note=f"{gib(tightest.free_bytes)} left on rank {tightest.rank} ({tightest.kind})",
    )


def _contest(
    outcome: "Outcome", costs: WorkloadCosts, stocks: Sequence[tuple[str, "Stock"]]
) -> Iterator["StrategyRow"]:
    from zorse_megatron.plots.report_page import StrategyRow

    rates = [stock.fitting.tokens_per_s for _, stock in stocks if stock.fitting is not None]
    most = max(outcome.tokens_per_s, *rates, 1.0)
    groups = len(outcome.plan.groups)
    yield StrategyRow(
        name="This plan",
        layout=f"{_gpus(costs.inputs.kinds)}: {groups} group{'s' * (groups != 1)}, "
        f"{outcome.plan.schedule.name}",
        iteration=duration(outcome.iteration_s),
        tokens=figure(outcome.tokens_per_s),
        percent=round(100 * outcome.tokens_per_s / most, 1),
        is_ours=True,
    )
    for name, stock in stocks:
        layout = stock.fitting
        if layout is None:
            yield StrategyRow(name=name, layout="", reason=stock.reason)
            continue
        yield StrategyRow(
            name=name,
            layout=layout.description,
            iteration=duration(layout.iteration_s),
            tokens=figure(layout.tokens_per_s),
            percent=round(100 * layout.tokens_per_s / most, 1),
        )


def _groups(plan: Plan, explanation: "Explanation") -> Iterator[tuple[str, ...]]:
    for load in explanation.loads:
        group = plan.groups[load.group]
        runs = dict.fromkeys(
            f"{each.num_microbatches} x {each.micro_batch_size}" for each in group.replicas
        )
        layers = spell([plan.chunks[chunk].layers for chunk in plan.chunks_of_group(load.group)])
        yield (
            f"{load.group} {group.name or ''}".strip(),
            ", ".join(f"{count} {kind}" for kind, count in load.kinds),
            f"{load.num_layers}: {layers}",
            f"{', '.join(runs)} samples",
            "; ".join(
                dict.fromkeys(memory_saved_by(group, each) or "nothing" for each in group.replicas)
            ),
            *map(percent, (load.busy, load.communication, load.waiting)),
        )


def _pictures(costs: WorkloadCosts, plan: Plan) -> Iterator["Picture"]:
    from zorse_megatron.plots.memory_bars import draw_memory
    from zorse_megatron.plots.report_page import Picture
    from zorse_megatron.plots.simulated_gantt import draw_timeline

    result = simulated(plan, costs, source="the plan")
    with TemporaryDirectory(prefix="zorse-page-") as directory:
        timeline = draw_timeline(
            Path(directory) / "timeline.png", plan=plan, result=result, title=""
        )
        yield Picture(
            title="One iteration",
            hint="Each GPU's timeline, made of the actions that its rank executes.",
            png=timeline.read_bytes(),
        )
        memory = draw_memory(
            Path(directory) / "memory.png",
            plan=plan,
            result=result,
            capacity_bytes=capacities_bytes(costs.cluster),
            title="",
        )
        yield Picture(
            title="Memory",
            hint="Peak memory of each GPU, against its capacity.",
            png=memory.read_bytes(),
        )


def _replan_rows(replans: "Replans | None") -> Iterator["ReplanRow"]:
    from zorse_megatron.planner.explain.sentences import faster
    from zorse_megatron.plots.report_page import ReplanRow

    for more in replans.one_more if replans else ():
        yield ReplanRow(
            what=f"one more {more.kind} in node {more.node}",
            iteration=duration(more.iteration_s),
            gain=faster(more.speedup),
        )
