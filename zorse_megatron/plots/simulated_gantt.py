"""A simulated iteration as a chart, in the form of the charts of executed ones."""

from pathlib import Path

from zorse_megatron.plots.gantt import draw_gantt
from zorse_megatron.plots.rows import MAX_ROWS, rows_of
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.result import SimulationResult


def draw_timeline(
    path: Path, *, plan: Plan, result: SimulationResult, title: str, max_rows: int = MAX_ROWS
) -> Path:
    """Draw what each rank did, and when.

    Of ranks of one group that did the same amount of work and waiting, and were simulated, one is
    drawn where there are more than `max_rows`.
    """
    simulated = set(result.simulated_ranks)
    rows = rows_of(
        plan,
        # Times that differ by rounding only look the same.
        look=lambda rank: (rank in simulated, f"{result.usage[rank].busy_s:.6g}"),
        weight=lambda rank: result.usage[rank].busy_s if rank in simulated else -1.0,
        most=max_rows,
    )
    ranks = [row.rank for row in rows if row.rank in simulated]
    if len(ranks) < plan.world_size:
        title += f" ({len(ranks)} of {plan.world_size} ranks)"
    spans = {rank: result.spans(rank) for rank in ranks}
    return draw_gantt(path, plan=plan, spans=spans, title=title, ranks=ranks)
