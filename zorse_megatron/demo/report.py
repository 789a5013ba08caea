"""What the demo leaves behind: a table, two figures and a file for programs.

matplotlib is imported to draw only, so that its absence can be told before the demo runs.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from zorse_megatron.demo.loss_comparison import (
    MAX_ABS_LOSS_DIFFERENCE,
    MAX_RELATIVE_GRAD_NORM_DIFFERENCE,
    Comparison,
    Iteration,
    rows_to_show,
)
from zorse_megatron.files.write import write_text
from zorse_megatron.plots.steps import duration_s, fastest_step, spans_of_step, training_steps
from zorse_megatron.processors import num_processors
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import dump_plan, fingerprint
from zorse_megatron.trace import load_trace

if TYPE_CHECKING:
    from zorse_megatron.plots.loss_curves import LossCurve

STOCK_LABEL = "stock Megatron, one process"


def plan_label(plan: Plan) -> str:
    """Name a plan by the sizes of its groups."""
    sizes = "|".join(str(len(plan.groups[chunk.group].ranks)) for chunk in plan.chunks)
    return f"plan, {plan.world_size} unequal ranks in groups of {sizes}"


def loss_table(comparison: Comparison, *, every: int = 5) -> Table:
    """Losses and gradient norms side by side, every few iterations."""
    table = Table(title="Loss and gradient norm, iteration by iteration")
    for heading in ("step", "stock loss", "plan loss", "difference", "stock norm", "plan norm"):
        table.add_column(heading, justify="right")
    pairs = comparison.pairs
    for index in rows_to_show(len(pairs), every=every):
        stock, plan = pairs[index]
        table.add_row(
            str(stock.iteration),
            f"{stock.loss:.8f}",
            f"{plan.loss:.8f}",
            f"{plan.loss - stock.loss:+.1e}",
            f"{stock.grad_norm:.6f}",
            f"{plan.grad_norm:.6f}",
        )
    return table


def draw_loss(path: Path, comparison: Comparison, plan: Plan) -> Path:
    """Draw both loss curves and their difference."""
    from zorse_megatron.plots.loss_curves import draw_curves

    return draw_curves(
        path,
        first=_curve(STOCK_LABEL, comparison.stock.iterations),
        second=_curve(plan_label(plan), comparison.plan.iterations),
        title="The same training, with stock Megatron and under an uneven plan (fp32)",
        tolerance=MAX_ABS_LOSS_DIFFERENCE,
        unit="nats per byte",
    )


def draw_timeline(path: Path, trace_directory: Path, plan: Plan) -> Path:
    """Draw the fastest iteration from the traces."""
    from zorse_megatron.plots.gantt import draw_gantt

    traces = dict(load_trace(file) for file in sorted(trace_directory.glob("trace-rank*.json")))
    step = fastest_step(traces)
    iteration = training_steps(traces).index(step) + 1
    return draw_gantt(
        path,
        plan=plan,
        spans=spans_of_step(traces, step),
        title=f"Iteration {iteration} under the plan, the fastest: "
        f"{duration_s(traces, step) * 1e3:.0f} ms ({plan.world_size} processes share "
        f"{num_processors()} CPU cores)",
    )


def write_json(
    path: Path, comparison: Comparison, plan: Plan, *, durations_s: dict[str, float]
) -> Path:
    """Write everything that was compared, for programs."""
    validation = comparison.max_abs_validation_difference
    runs = {"stock": comparison.stock, "plan": comparison.plan}
    content: dict[str, Any] = {
        "steps": len(comparison.pairs),
        "max_abs_loss_diff": comparison.max_abs_loss_difference,
        "max_rel_grad_norm_diff": comparison.max_relative_grad_norm_difference,
        # null: the runs were evaluated at different iterations.
        "max_abs_validation_loss_diff": validation if math.isfinite(validation) else None,
        "allowed": {
            "max_abs_loss_diff": MAX_ABS_LOSS_DIFFERENCE,
            "max_rel_grad_norm_diff": MAX_RELATIVE_GRAD_NORM_DIFFERENCE,
        },
        "plan": json.loads(dump_plan(plan)),
        "plan_fingerprint": fingerprint(plan),
        "job_duration_s": durations_s,
        "median_iteration_s": {
            name: _median_iteration_s(run.iterations) for name, run in runs.items()
        },
        "validation_losses": {name: dict(run.validation_losses) for name, run in runs.items()},
        "iterations": {name: list(map(asdict, run.iterations)) for name, run in runs.items()},
    }
    return write_text(path, json.dumps(content, indent=1) + "\n")


def _curve(label: str, run: Sequence[Iteration]) -> "LossCurve":
    from zorse_megatron.plots.loss_curves import LossCurve

    return LossCurve(
        label=label,
        iterations=[iteration.iteration for iteration in run],
        losses=[iteration.loss for iteration in run],
    )


def _median_iteration_s(run: Sequence[Iteration]) -> float | None:
    durations = [iteration.elapsed_s for iteration in run if iteration.elapsed_s is not None]
    return median(durations) if durations else None
