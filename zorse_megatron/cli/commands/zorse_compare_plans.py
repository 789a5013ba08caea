"""`zorse compare-plans`: every strategy's plan for the same cluster and model."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from zorse_megatron.cli.after_dashes import training_flags
from zorse_megatron.cli.console import print_json, print_plain, print_table, reported_errors
from zorse_megatron.cli.options import (
    DEFAULT_MARGIN,
    AsJson,
    ClusterFile,
    DtypeOrAuto,
    GlobalBatchSize,
    Margin,
    Model,
    Profiles,
    SeqLength,
)
from zorse_megatron.cli.plan_answer import not_trainable_yet
from zorse_megatron.cli.plan_options import strategy_named
from zorse_megatron.cli.progress_display import progress_bar
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_of_workload, needed_batch_size
from zorse_megatron.errors import ZorseError
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.plan.memory_settings import settings_in
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.figures import duration, figure

if TYPE_CHECKING:
    from zorse_megatron.planner.baselines.stock_best import StockLayout
    from zorse_megatron.planner.outcome import Outcome, Strategy

STOCK = "stock, all GPUs"
BEST_GPUS = "stock, best GPUs"


@dataclass(frozen=True, kw_only=True)
class _PlanRow:
    """One row: a strategy's plan or stock Megatron itself, or why there is none."""

    strategy: str
    reason: str = ""
    outcome: "Outcome | None" = None
    stock: "StockLayout | None" = None

    @property
    def found(self) -> "Outcome | StockLayout | None":
        """The plan or the stock layout that was found."""
        return self.outcome or self.stock


def compare_plans(  # noqa: PLR0917
    context: typer.Context,
    cluster: ClusterFile,
    model: Model = None,
    profile: Profiles = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    dtype: DtypeOrAuto = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only this strategy; repeatable. Default: all.")
    ] = None,
    margin: Margin = DEFAULT_MARGIN,
    as_json: AsJson = False,
) -> None:
    """Compare every strategy's plan in the simulator."""
    with reported_errors(as_json=as_json):
        from zorse_megatron.planner.outcome import STRATEGIES

        strategies = [strategy_named(name) for name in strategy or STRATEGIES]
        workload = workload_of(
            model=model,
            flags=training_flags(context),
            global_batch_size=global_batch_size,
            seq_length=seq_length,
            dtype=dtype,
            dtype_may_be_auto=True,
        )
        costs = costs_of_workload(
            load_cluster(cluster),
            workload,
            profile or [],
            global_batch_size=needed_batch_size(workload),
            margin=margin,
        )
        rows = [
            row for each in strategies for row in _rows(costs, each, shows_progress=not as_json)
        ]
    if as_json:
        print_json({"ok": True, "dtype": costs.dtype, "plans": _as_json(costs, rows)})
    else:
        _print(costs, rows)
    if not any(row.found for row in rows):
        raise typer.Exit(1)


def _rows(
    costs: WorkloadCosts, strategy: "Strategy", *, shows_progress: bool
) -> Iterator[_PlanRow]:
    from zorse_megatron.planner.find_plan import NoPlanError, find_plan

    if strategy == "stock":
        yield from _stock_rows(costs)
        return
    try:
        with progress_bar(wanted=shows_progress, title=strategy) as on_progress:
            outcome = find_plan(costs.inputs, strategy=strategy, on_progress=on_progress)
    except NoPlanError as error:
        yield _PlanRow(strategy=strategy, reason=_reason(error))
        return
    yield _PlanRow(strategy=strategy, outcome=outcome)


def _stock_rows(costs: WorkloadCosts) -> Iterator[_PlanRow]:
    """Stock Megatron as `zorse compare` trains it: on all GPUs, and on the best of them."""
    from zorse_megatron.planner.baselines import stock_best

    for name, found in (
        (STOCK, stock_best.stock_on_all(costs.inputs)),
        (BEST_GPUS, stock_best.stock_on_best(costs.inputs)),
    ):
        yield _PlanRow(strategy=name, reason=found.reason, stock=found.fitting)


def _reason(error: ZorseError) -> str:
    return " ".join(str(problem) for problem in error.problems)


def _print(costs: WorkloadCosts, rows: list[_PlanRow]) -> None:
    headings = ("Strategy", "Iteration", "Tokens/s", "Against stock", "Efficiency", "Memory")
    table = Table(*headings, "Groups", "Recompute")
    stock = _stock_tokens_per_s(rows)
    for row in rows:
        if row.found is None:
            table.add_row(row.strategy, "no plan")
            continue
        cells = [
            row.strategy,
            duration(row.found.iteration_s),
            figure(row.found.tokens_per_s),
            f"{figure(row.found.tokens_per_s / stock)} x" if stock else "-",
            f"{_bound_s(costs) / row.found.iteration_s:.2f}",
            f"{100 * _fullest(row):.0f} %",
            str(_num_groups(row)),
            _recompute(row),
        ]
        table.add_row(*map(Text, cells))
    print_table(table)
    for row in rows:
        if row.found is None:
            print_plain(f"{row.strategy}: no plan: {row.reason}")
        elif row.stock is not None:
            print_plain(f"{row.strategy}: {row.stock.description}")
        elif row.outcome is not None and (cannot := not_trainable_yet(row.outcome.plan)):
            print_plain(f"note: {row.strategy}: {cannot}")
    for note in costs.notes:
        print_plain(f"note: {note}")


def _as_json(costs: WorkloadCosts, rows: list[_PlanRow]) -> list[dict[str, Any]]:
    stock = _stock_tokens_per_s(rows)
    answers = []
    for row in rows:
        if row.found is None:
            answers.append({"strategy": row.strategy, "feasible": False, "reason": row.reason})
            continue
        answer = {
            "strategy": row.strategy,
            "feasible": True,
            "iteration_s": row.found.iteration_s,
            "tokens_per_s": row.found.tokens_per_s,
            "against_stock": row.found.tokens_per_s / stock if stock else None,
            "bound_s": _bound_s(costs),
            "efficiency": _bound_s(costs) / row.found.iteration_s,
            "peak_memory_fraction": _fullest(row),
            "num_groups": _num_groups(row),
            "recompute": _recompute(row),
        }
        if row.outcome is not None:
            answer["recomputing_bound_s"] = row.outcome.recomputing_bound_s
            answer["plan_time_s"] = row.outcome.plan_time_s
            answer["can_be_trained"] = not_trainable_yet(row.outcome.plan) is None
        elif row.stock is not None:
            answer |= {"layout": row.stock.description, "ranks": list(row.stock.ranks)}
        answers.append(answer)
    return answers


def _bound_s(costs: WorkloadCosts) -> float:
    from zorse_megatron.planner.baselines.lower_bound import lower_bound_s

    return lower_bound_s(costs.inputs)


def _fullest(row: _PlanRow) -> float:
    if row.stock is not None:
        return row.stock.fullest
    assert row.outcome is not None
    return row.outcome.peak_memory_fraction


def _num_groups(row: _PlanRow) -> int:
    if row.stock is not None:
        return row.stock.grid.stages
    assert row.outcome is not None
    return row.outcome.num_groups


def _recompute(row: _PlanRow) -> str:
    if row.stock is not None:
        return row.stock.grid.mode
    assert row.outcome is not None
    return recompute_of(row.outcome.plan)


def _stock_tokens_per_s(rows: list[_PlanRow]) -> float | None:
    """On all GPUs; on the best of them where it does not fit on all."""
    rates = {row.strategy: row.stock.tokens_per_s for row in rows if row.stock is not None}
    return rates.get(STOCK) or rates.get(BEST_GPUS)


def recompute_of(plan: Plan) -> str:
    """The modes that the groups of a plan have, or their replicas, most common first."""
    modes = Counter(
        mode
        for group in plan.groups
        for mode in {
            each.recompute.mode if each.recompute else "none"
            for each in (settings_in(group, replica) for replica in group.replicas)
        }
    )
    return " + ".join(mode for mode, _ in modes.most_common())
