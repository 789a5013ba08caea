"""`zorse compare-plans`: what each strategy makes of the same cluster and model."""

from collections import Counter
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
from zorse_megatron.cli.plan import not_trainable_yet, strategy_named
from zorse_megatron.cli.priced import Priced, needed_batch_size, priced
from zorse_megatron.cli.progress import progress_bar
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.errors import ZorseError
from zorse_megatron.schema.cluster_yaml import load_cluster
from zorse_megatron.schema.plan import Plan

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome, Strategy


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One strategy: its plan, or why it has none."""

    strategy: str
    outcome: "Outcome | None"
    reason: str


def compare_plans(  # noqa: PLR0917
    context: typer.Context,
    cluster: ClusterFile,
    model: Model = None,
    profile: Profiles = None,
    global_batch_size: GlobalBatchSize = None,
    seq_length: SeqLength = None,
    dtype: DtypeOrAuto = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Only this one; repeatable. Left out: all.")
    ] = None,
    margin: Margin = DEFAULT_MARGIN,
    as_json: AsJson = False,
) -> None:
    """Compare the plans of all strategies for a model on a cluster."""
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
        prices = priced(
            load_cluster(cluster),
            workload,
            profile or [],
            global_batch_size=needed_batch_size(workload),
            margin=margin,
        )
        rows = [_row(prices, each, shows_progress=not as_json) for each in strategies]
    if as_json:
        print_json({"ok": True, "dtype": prices.dtype, "plans": _as_json(rows)})
    else:
        _print(prices, rows)
    if not any(row.outcome for row in rows):
        raise typer.Exit(1)


def _row(prices: Priced, strategy: "Strategy", *, shows_progress: bool) -> _Row:
    from zorse_megatron.planner.search import NoPlanError, find_plan

    try:
        with progress_bar(wanted=shows_progress, title=strategy) as on_progress:
            outcome = find_plan(prices.inputs, strategy=strategy, on_progress=on_progress)
    except NoPlanError as error:
        return _Row(strategy=strategy, outcome=None, reason=_reason(error))
    return _Row(strategy=strategy, outcome=outcome, reason="")


def _reason(error: ZorseError) -> str:
    return " ".join(str(problem) for problem in error.problems)


def _print(prices: Priced, rows: list[_Row]) -> None:
    headings = ("Strategy", "Iteration", "Tokens/s", "Against stock", "Efficiency", "Memory")
    table = Table(*headings, "Groups", "Recompute")
    stock = _stock_tokens_per_s(rows)
    for row in rows:
        outcome = row.outcome
        if outcome is None:
            table.add_row(row.strategy, "no plan")
            continue
        cells = [
            row.strategy,
            f"{outcome.iteration_s:.4g} s",
            f"{outcome.tokens_per_s:,.0f}",
            f"{outcome.tokens_per_s / stock:.2f} x" if stock else "-",
            f"{outcome.efficiency:.2f}",
            f"{100 * outcome.peak_memory_fraction:.0f} %",
            str(outcome.num_groups),
            recompute_of(outcome.plan),
        ]
        table.add_row(*map(Text, cells))
    print_table(table)
    for row in rows:
        if row.outcome is None:
            print_plain(f"{row.strategy}: no plan: {row.reason}")
        else:
            cannot = not_trainable_yet(row.outcome.plan)
            if cannot:
                print_plain(f"note: {row.strategy}: {cannot}")
    for note in prices.notes:
        print_plain(f"note: {note}")


def _as_json(rows: list[_Row]) -> list[dict[str, Any]]:
    stock = _stock_tokens_per_s(rows)
    answers = []
    for row in rows:
        outcome = row.outcome
        if outcome is None:
            answers.append({"strategy": row.strategy, "feasible": False, "reason": row.reason})
            continue
        answers.append(
            {
                "strategy": row.strategy,
                "feasible": True,
                "iteration_s": outcome.iteration_s,
                "tokens_per_s": outcome.tokens_per_s,
                "against_stock": outcome.tokens_per_s / stock if stock else None,
                "bound_s": outcome.bound_s,
                "efficiency": outcome.efficiency,
                "peak_memory_fraction": outcome.peak_memory_fraction,
                "plan_time_s": outcome.plan_time_s,
                "num_groups": outcome.num_groups,
                "recompute": recompute_of(outcome.plan),
                "can_be_trained": not_trainable_yet(outcome.plan) is None,
            }
        )
    return answers


def _stock_tokens_per_s(rows: list[_Row]) -> float | None:
    outcomes = [row.outcome for row in rows if row.strategy == "stock" and row.outcome]
    return outcomes[0].tokens_per_s if outcomes else None


def recompute_of(plan: Plan) -> str:
    """The modes that the groups of a plan have, most common first."""
    modes = Counter(group.recompute.mode if group.recompute else "none" for group in plan.groups)
    return " + ".join(mode for mode, _ in modes.most_common())
