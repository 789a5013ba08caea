"""Peak memory of each rank against what its GPU has, as bars by category."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from zorse_megatron.plots.figure import FAINT, TEXT, new_figure, save_figure
from zorse_megatron.plots.rows import MAX_ROWS, ShownRank, rows_of
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.ledger import Category
from zorse_megatron.simulate.result import SimulationResult

GIB = 2**30
_BAR_HEIGHT = 0.72
_TOO_MUCH = "#D55E00"
_COLOURS = {
    Category.PARAMETERS: "#0072B2",
    Category.GRADIENTS: "#CC79A7",
    Category.OPTIMIZER_STATE: "#8C2D04",
    Category.ACTIVATIONS: "#56B4E9",
    Category.BUFFERS: "#009E73",
    Category.LOGITS: "#F0E442",
    Category.FIXED: "#B0B0B0",
}


def draw_memory(
    path: Path,
    *,
    plan: Plan,
    result: SimulationResult,
    capacity_bytes: Sequence[int],
    title: str,
    max_rows: int = MAX_ROWS,
) -> Path:
    """Draw what each rank's GPU holds at its peak; `capacity_bytes`: what it has, by rank.

    Where there are more ranks than `max_rows`, ranks of a group that look the same share a row.
    """
    if len(capacity_bytes) != plan.world_size:
        raise ValueError(
            f"found capacities of {len(capacity_bytes)} GPUs; expected {plan.world_size}, "
            "one per rank"
        )
    peaks = result.peak_memory_bytes
    rows = rows_of(
        plan,
        # A hundredth of a GiB cannot be told apart.
        look=lambda rank: (round(peaks[rank] * 100 / GIB), capacity_bytes[rank]),
        weight=lambda rank: peaks[rank] / max(1, capacity_bytes[rank]),
        most=max_rows,
    )
    figure = new_figure(width_inches=10, height_inches=1.7 + 0.34 * len(rows))
    axes = figure.subplots()
    axes.set_title(title, fontsize=12, loc="left")
    _draw_bars(axes, rows, result)
    _draw_capacities(axes, rows, result, capacity_bytes)
    _name_rows(axes, plan, rows)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return save_figure(figure, path)


def _draw_bars(axes: Axes, rows: Sequence[ShownRank], result: SimulationResult) -> None:
    left = [0.0] * len(rows)
    for category in Category:
        widths = [result.memory[row.rank].at_peak_bytes[category] / GIB for row in rows]
        if any(widths):
            axes.barh(
                range(len(rows)),
                widths,
                left=left,
                height=_BAR_HEIGHT,
                color=_COLOURS[category],
                label=category.label,
            )
        left = [start + width for start, width in zip(left, widths, strict=True)]


def _draw_capacities(
    axes: Axes, rows: Sequence[ShownRank], result: SimulationResult, capacity_bytes: Sequence[int]
) -> None:
    """A mark at each capacity, and beside the bar the share of it that is taken."""
    axes.plot([], [], color=TEXT, linewidth=2, label="the GPU's memory")
    widest = 0.0
    for number, row in enumerate(rows):
        capacity, peak = capacity_bytes[row.rank] / GIB, result.peak_memory_bytes[row.rank] / GIB
        fits = peak <= capacity
        axes.vlines(
            capacity,
            number - 0.46,
            number + 0.46,
            color=TEXT if fits else _TOO_MUCH,
            linewidth=2,
        )
        share = f"{peak / capacity:.0%}" if capacity else "-"
        axes.annotate(
            f"{peak:.1f} GiB, {share}",
            (max(capacity, peak), number),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=FAINT if fits else _TOO_MUCH,
        )
        widest = max(widest, capacity, peak)
    axes.set_xlim(0, 1.18 * widest if widest else 1)


def _name_rows(axes: Axes, plan: Plan, rows: Sequence[ShownRank]) -> None:
    labels = []
    for row in rows:
        name = plan.groups[row.group].name or f"group {row.group}"
        labels.append(f"{row.label}, {name}")
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.45, -0.55)  # the first rank on top
    axes.set_xlabel("memory at the rank's peak (GiB = 2³⁰ bytes)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
