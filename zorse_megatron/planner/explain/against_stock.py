"""A plan beside stock Megatron's best layouts: how much longer these take, and what they lack."""

import re
from collections.abc import Iterator, Sequence

from zorse_megatron.errors import PlanError
from zorse_megatron.planner.baselines.stock_best import StockAtBest
from zorse_megatron.planner.baselines.stock_plans import grid_of_plan
from zorse_megatron.planner.explain.explanation import AgainstStock
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.figures import as_against, duration


def against_stock(plan: Plan, nodes: Sequence[range], stock: StockAtBest) -> AgainstStock:
    """Compare with what stock takes on the plan's GPUs, or the best of them.

    `nodes`: ranks of each.
    """
    even, best = stock.even.fitting, stock.best.fitting
    return AgainstStock(
        even_s=None if even is None else even.iteration_s,
        best_s=None if best is None else best.iteration_s,
        layout=None if best is None else best.description,
        reason=stock.best.reason,
        lacks=tuple(dict.fromkeys(_lacks(plan, nodes))),
    )


def stock_sentence(found: AgainstStock, iteration_s: float) -> str:
    """Say how long stock takes, and why."""
    if found.best_s is None:
        return f"Stock Megatron has no layout that fits: {found.reason}."
    even = (
        "none fits evenly"
        if found.even_s is None
        else f"{duration(found.even_s)} in its best even one"
    )
    why = "It could run a layout like this plan's"
    if found.lacks:
        *most, last = found.lacks
        why = (
            f"Unlike this plan, it has {' and '.join([', '.join(most), last] if most else [last])}"
        )
    return (
        f"Stock Megatron takes {duration(found.best_s)} in its best layout ({found.layout}), "
        f"{as_against(found.best_s, iteration_s)}, {even}. {why}."
    )


_SAID = {
    "groups": "as many replicas in each stage",
    "micro_batch_size": "one micro-batch size",
    "num_microbatches": "as many micro-batches on each replica",
    "shard_weight": "equal shards",
    "ranks": "one tensor-parallel degree",
    "parts": "equal parts in tensor parallelism",
    "recompute": "one recompute setting",
    "parameters": "parameters on the GPUs alone",
    "gradients": "gradients on the GPUs alone",
    "activations": "activations on the GPUs alone",
    "chunks": "as many virtual stages on each rank",
    "name": "another schedule",
    "split_backward": "backwards in one piece",
    "compute_dtype": "one compute dtype",
}
"""Field of a plan that stock cannot do -> what it has in its place."""


def _lacks(plan: Plan, nodes: Sequence[range]) -> Iterator[str]:
    try:
        grid_of_plan(plan, nodes)
    except PlanError as error:
        for problem in error.problems:
            field = re.sub(r"\[\d+\]", "", problem.where).rpartition(".")[2]
            if field in _SAID and (len(plan.groups) > 1 or field != "name"):
                yield _SAID[field]
