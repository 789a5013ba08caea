"""`zorse plan --html`: plan, reasons, stock's best layouts and gains of more GPUs on one page."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import gib, progress_bar
from zorse_megatron.cli.gpu_selection import gpus_of, spares
from zorse_megatron.cli.plan_answer import Answer, notes_on
from zorse_megatron.cli.plan_table import memory_saved_by, plan_line
from zorse_megatron.cli.simulated import capacities_bytes, simulated, types_of
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spell
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.figures import duration, figure, percent

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import Stock, StockAtBest, StockLayout
    from zorse_megatron.planner.explain.explanation import Explanation
    from zorse_megatron.planner.explain.replan import Replans
    from zorse_megatron.planner.outcome import Outcome
    from zorse_megatron.plots.report_page import Card, Picture, PlanPage, ReplanRow, StrategyRow

_HEADINGS = (
    *("Group", "GPUs", "Layers", "Micro-batches", "Memory saved by"),
    *("Busy", "Communication", "Waiting"),
)


def plan_page(answer: Answer, *, shows_progress: bool) -> str:
    """Return the page. Searches once more for each kind of GPU, below 256 of them."""
    from zorse_megatron.planner.explain.analysis import explain
    from zorse_megatron.planner.explain.replan import replan

    inputs, outcome = answer.costs.inputs, answer.outcome
    with progress_bar(wanted=shows_progress, title="page") as on_progress:
        replans = replan(inputs, found_s=outcome.iteration_s, on_progress=on_progress)
    explanation = answer.explanation or explain(inputs, outcome.plan)
    return _page(answer, explanation, replans).html()


def _page(answer: Answer, explanation: "Explanation", replans: "Replans | None") -> "PlanPage":
    from zorse_megatron.planner.explain.replan import MOST_GPUS
    from zorse_megatron.plots.report_page import PlanPage

    costs, outcome = answer.costs, answer.outcome
    plan, inputs, counts = outcome.plan, costs.inputs, outcome.considered
    selected = answer.selected
    left_out = f" ({spares(selected)})" if selected is not None and selected.left_out else ""
    return PlanPage(
        title=f"{costs.workload.model.name} on {costs.cluster.name or 'the cluster'}",
        subtitle=(
            f"{gpus_of(costs.cluster, range(inputs.world_size))}{left_out}; "
            f"{inputs.global_batch_size} samples of {inputs.sequence_length:,} tokens an "
            f"iteration, {types_of(plan, costs)}"
        ),
        cards=tuple(_cards(answer, explanation)),
        contest=tuple(_contest(answer)),
        plan_line=plan_line(plan),
        group_headings=_HEADINGS,
        groups=tuple(_groups(plan, explanation)),
        reasons=answer.sentences,
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
        notes=notes_on(costs, outcome),
        footer=(
            "Predicted by zorse-megatron's simulator, which executes the ranks' own lists of "
            "actions. Not measured."
        ),
    )


def _cards(answer: Answer, explanation: "Explanation") -> Iterator["Card"]:
    from zorse_megatron.plots.report_page import Card

    outcome, bar = answer.outcome, answer.error_bar
    yield Card(
        label="One iteration",
        value=duration(outcome.iteration_s),
        note=f"{figure(outcome.tokens_per_s)} tokens/s, ± {percent(bar.share)} ({bar.basis})",
    )
    best = None if answer.stock is None else answer.stock.best.fitting
    why = "not computed for so many GPUs" if answer.stock is None else "none fits"
    yield Card(
        label="Against stock's best layout",
        value="-" if best is None else f"{figure(best.iteration_s / outcome.iteration_s)} x",
        note=why if best is None else f"it takes {duration(best.iteration_s)}",
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


def _contest(answer: Answer) -> Iterator["StrategyRow"]:
    """Both layouts of stock on any GPUs of the whole cluster, and the plan."""
    from zorse_megatron.plots.report_page import StrategyRow

    outcome, stocks = answer.outcome, () if answer.stock is None else _stocks(answer.stock)
    fitting = [stock.fitting for _, stock in stocks if stock.fitting is not None]
    most = max(outcome.tokens_per_s, *(each.tokens_per_s for each in fitting), 1.0)

    def row(name: str, layout: str, found: "Outcome | StockLayout") -> "StrategyRow":
        return StrategyRow(
            name=name,
            layout=layout,
            iteration=duration(found.iteration_s),
            tokens=figure(found.tokens_per_s),
            percent=round(100 * found.tokens_per_s / most, 1),
            is_ours=found is outcome,
        )

    for name, stock in stocks:
        layout = stock.fitting
        if layout is None:
            yield StrategyRow(name=name, layout="", reason=stock.reason)
        else:
            yield row(name, layout.description, layout)
    gpus = gpus_of(answer.costs.cluster, range(outcome.plan.world_size))
    groups = number_of(len(outcome.plan.groups), "group")
    yield row(outcome.strategy, f"{gpus}: {groups}, {outcome.plan.schedule.name}", outcome)


def _stocks(stock: "StockAtBest") -> tuple[tuple[str, "Stock"], ...]:
    return (("stock, best even layout", stock.even), ("stock, best layout", stock.best))


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
