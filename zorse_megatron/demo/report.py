"""What the demo shows: which rank stands for which GPU, the two runs, and two figures.

matplotlib is imported to draw only, so that its absence can be told before the demo runs.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from zorse_megatron.doctor.doctor_run import Trained
from zorse_megatron.doctor.plans import MAX_ABS_LOSS_DIFFERENCE
from zorse_megatron.plots.steps import duration_s, fastest_step, spans_of_step, training_steps
from zorse_megatron.processors import num_processors
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spell
from zorse_megatron.trace import load_trace

if TYPE_CHECKING:
    from zorse_megatron.plots.loss_curves import LossCurve

SHOW_EVERY = 5
# Stock's line (`megatron.training.training:evaluate_and_print_results`), e.g.
# " validation loss at iteration 20 | lm loss value: 3.048148E+00 | lm loss PPL: ..."
_VALIDATION = re.compile(r" validation loss at (.+?) \| lm loss value: ([-+.\dEe]+) \|")


def stands_for_table(plan: Plan) -> Table:
    """Rank -> the GPU for which its process stands, and what the plan gives it."""
    table = Table(
        title="A process on this machine stands for each GPU of the plan",
        caption="samples: micro-batches x size; state: share of its layers' optimizer state",
    )
    for heading in ("rank", "stands for", "layers", "samples", "state"):
        table.add_column(heading)
    kinds = (plan.cluster and plan.cluster.gpu_kinds) or ()
    for rank in range(plan.world_size):
        number, place = plan.replica_of_rank(rank)
        replicas = plan.groups[number].replicas
        share = replicas[place].shard_weight / sum(each.shard_weight for each in replicas)
        table.add_row(
            str(rank),
            kinds[rank] if kinds else "",
            spell([plan.chunks[chunk].layers for chunk in plan.chunks_of_group(number)]),
            f"{replicas[place].num_microbatches} x {replicas[place].micro_batch_size}",
            f"{100 * share / len(replicas[place].ranks):.0f} %",
        )
    return table


def loss_table(stock: Trained, plan: Trained) -> Table:
    """Losses and gradient norms side by side, every few iterations."""
    table = Table(title="Loss and gradient norm, iteration by iteration (trained on this machine)")
    for heading in ("step", "stock loss", "plan loss", "difference", "stock norm", "plan norm"):
        table.add_column(heading, justify="right")
    steps = sorted(stock.losses.keys() & plan.losses.keys())
    for step in steps:
        if step in {steps[0], steps[-1]} or step % SHOW_EVERY == 0:
            losses = stock.losses[step], plan.losses[step]
            table.add_row(
                str(step),
                *(f"{loss:.8f}" for loss in losses),
                f"{losses[1] - losses[0]:+.1e}",
                *(f"{run.grad_norms[step]:.6f}" for run in (stock, plan)),
            )
    return table


def validation_difference(stock: Trained, plan: Trained) -> float:
    """The largest distance of two validation losses; infinite if one run has others, or none."""
    first, second = _validation_losses(stock.directory), _validation_losses(plan.directory)
    if not first or first.keys() != second.keys():
        return math.inf
    return max(abs(second[where] - loss) for where, loss in first.items())


def _validation_losses(directory: Path) -> dict[str, float]:
    logs = [path.read_text(errors="replace") for path in directory.glob("rank_*.txt")]
    return {where: float(loss) for log in logs for where, loss in _VALIDATION.findall(log)}


def draw_loss(path: Path, stock: Trained, plan: Trained) -> Path:
    """Draw both loss curves and their difference."""
    from zorse_megatron.plots.loss_curves import draw_curves

    return draw_curves(
        path,
        first=_curve("stock Megatron, one process", stock),
        second=_curve("the plan, a process for each GPU", plan),
        title="The same training, with stock Megatron and under a plan (fp32, on the CPU)",
        tolerance=MAX_ABS_LOSS_DIFFERENCE,
        unit="nats per byte",
    )


def draw_timeline(path: Path, plan: Plan, traces_directory: Path) -> Path:
    """Draw the fastest iteration from the traces."""
    from zorse_megatron.plots.gantt import draw_gantt

    traces = dict(load_trace(file) for file in sorted(traces_directory.glob("trace-rank*.json")))
    step = fastest_step(traces)
    iteration = training_steps(traces).index(step) + 1
    return draw_gantt(
        path,
        plan=plan,
        spans=spans_of_step(traces, step),
        title=f"Iteration {iteration} of the small model on the CPU: "
        f"{duration_s(traces, step) * 1e3:.0f} ms ({plan.world_size} processes share "
        f"{num_processors()} cores; all are equally fast here)",
    )


def _curve(label: str, run: Trained) -> "LossCurve":
    from zorse_megatron.plots.loss_curves import LossCurve

    return LossCurve(label=label, iterations=list(run.losses), losses=list(run.losses.values()))
