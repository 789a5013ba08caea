"""Figures of comparisons, losses and memory, without a window; and a page of them."""

import io
from base64 import b64encode
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.table import Table

from zorse_megatron.files.read_write import write_bytes
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.spans import spans_of, spell
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import SimulationResult

DOTS_PER_INCH = 150
MAX_ROWS = 40
"""More rows than this are too many to read."""
TEXT = "#222222"
FAINT = "#6b6b6b"


def new_figure(*, width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure that needs no display and leaves matplotlib's global state alone."""
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_chart(title: str, *, width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    """Return such a figure with one chart, under a title."""
    figure = new_figure(width_inches=width_inches, height_inches=height_inches)
    axes = figure.subplots()
    axes.set_title(title, fontsize=12, loc="left")
    return figure, axes


def save_figure(figure: Figure, path: Path, *, description: str | None = None) -> Path:
    """Write the figure as PNG and return its path; `description` goes into the file as text."""
    picture = io.BytesIO()
    # No version of matplotlib in the file: equal figures are equal files.
    said = {"Software": None, **({"Description": description} if description else {})}
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH, metadata=said)
    return write_bytes(path, picture.getvalue(), parents=True)


# Which ranks a figure shows.


@dataclass(frozen=True, kw_only=True)
class ShownRank:
    """One row of a figure: a rank, and the ranks of its group that look like it."""

    rank: int
    alike: tuple[int, ...]
    group: int

    @property
    def label(self) -> str:
        """`rank 3`, or `ranks 0 to 7, 16 (9 alike)`."""
        if len(self.alike) == 1:
            return f"rank {self.rank}"
        spans = spans_of(self.alike)
        more = " …" if len(spans) > 2 else ""
        return f"ranks {spell(spans[:2])}{more} ({len(self.alike)} alike)"


def rows_of(
    plan: Plan,
    look: Callable[[int], Hashable],
    weight: Callable[[int], float],
    *,
    most: int = MAX_ROWS,
) -> tuple[ShownRank, ...]:
    """One row per rank in model order if they fit; else one per group and look.

    `look`: what ranks that may share a row have in common; `weight`: if there are still too many
    rows, each group keeps those of the highest weight.
    """
    merged = plan.world_size > most
    rows = {each: _rows_of_group(plan, each, look, merged) for each in plan.groups_in_order}
    kept = max(1, most // len(rows))
    shown = []
    for of_group in rows.values():
        heaviest = sorted(of_group, key=lambda row: (-weight(row.rank), row.rank))
        wanted = of_group if sum(map(len, rows.values())) <= most else heaviest[:kept]
        shown += [row for row in of_group if row in wanted]
    return tuple(shown)


def _rows_of_group(
    plan: Plan, number: int, look: Callable[[int], Hashable], merged: bool
) -> list[ShownRank]:
    ranks: dict[Hashable, list[int]] = {}
    for rank in plan.groups[number].ranks:
        ranks.setdefault(look(rank) if merged else rank, []).append(rank)
    return [ShownRank(rank=alike[0], alike=tuple(alike), group=number) for alike in ranks.values()]


# Peak memory of each rank against what its GPU has, as bars by category.


GIB = 2**30
_BAR_HEIGHT = 0.72
_TOO_MUCH = "#D55E00"
_MEMORY_COLOURS = {
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
    peaks = result.peak_memory_bytes
    rows = rows_of(
        plan,
        # A hundredth of a GiB cannot be told apart.
        look=lambda rank: (round(peaks[rank] * 100 / GIB), capacity_bytes[rank]),
        weight=lambda rank: peaks[rank] / max(1, capacity_bytes[rank]),
        most=max_rows,
    )
    figure, axes = new_chart(title, width_inches=10, height_inches=1.7 + 0.34 * len(rows))
    _draw_bars(axes, rows, result)
    _draw_capacities(axes, rows, result, capacity_bytes)
    labels = [f"{row.label}, {plan.group_name(row.group)}" for row in rows]
    name_rows(axes, labels, "memory at the rank's peak (GiB = 2³⁰ bytes)")
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
                color=_MEMORY_COLOURS[category],
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


def name_rows(axes: Axes, labels: Sequence[str], x_label: str) -> None:
    """Label rows of ranks, the first on top, and what goes to the right."""
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.set_xlabel(x_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


# Pictures of a comparison: tokens/s as bars, and what the GPUs of two systems do meanwhile.


_BAR = "#0072B2"
_OTHERS = "#B0B0B0"
_PANEL_COLOURS = {"F": "#56B4E9", "B": "#E69F00", "STEP": "#8C2D04"}
_LABELS = {"F": "forward", "B": "backward", "STEP": "optimizer step"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One system; `note` stands in place of the bar where there is no number."""

    label: str
    tokens_per_s: float | None
    note: str = ""
    is_ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One iteration of one system. Times in seconds, on one clock."""

    title: str
    rows: Sequence[str]
    """Names of the ranks."""
    spans: Sequence[Sequence[tuple[str, float, float]]]
    """Rank -> (F, B or STEP, start, end)."""
    start_s: float
    """When the iteration begins."""


def draw_bars(path: Path, bars: Sequence[Bar], *, title: str) -> Path:
    """Draw tokens/s of each system, ours in colour."""
    figure, axes = new_chart(title, width_inches=9, height_inches=1.4 + 0.5 * len(bars))
    most = max((bar.tokens_per_s or 0.0 for bar in bars), default=0.0) or 1.0
    for row, bar in enumerate(bars):
        colour = _BAR if bar.is_ours else _OTHERS
        axes.barh(row, bar.tokens_per_s or 0.0, height=0.66, color=colour)
        text = bar.note if bar.tokens_per_s is None else f"{bar.tokens_per_s:,.0f}"
        right = (bar.tokens_per_s or 0.0) + 0.01 * most
        axes.text(right, row, text, va="center", color=TEXT, fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_xlim(0, 1.15 * most)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlabel("tokens/s")
    _tidy(axes)
    return save_figure(figure, path)


def draw_panels(path: Path, panels: Sequence[Panel], *, title: str) -> Path:
    """Draw iterations below each other on one scale, so that the shorter one is seen as shorter."""
    heights = [len(panel.rows) for panel in panels]
    figure = new_figure(
        width_inches=12, height_inches=1.6 + 0.36 * sum(heights) + 0.5 * len(panels)
    )
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, panel in zip(grid[:, 0], panels, strict=True):
        _draw_panel(axes, panel)
    grid[-1, 0].set_xlabel("seconds since the iteration began")
    handles = [Patch(color=_PANEL_COLOURS[kind], label=label) for kind, label in _LABELS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save_figure(figure, path, description="\n".join(_said(panel) for panel in panels))


def _said(panel: Panel) -> str:
    """What a panel shows, for those who cannot see it: its title and its ranks."""
    return f"{panel.title} ({', '.join(panel.rows)})"


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    for row, spans in enumerate(panel.spans):
        for kind, colour in _PANEL_COLOURS.items():
            pieces = [(start - panel.start_s, end - start) for k, start, end in spans if k == kind]
            axes.broken_barh(pieces, (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(panel.rows)), panel.rows, fontsize=8)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT, labelcolor=TEXT)


# Two loss curves over one another, and their difference below.


_FIRST_COLOUR = "#E69F00"
_SECOND_COLOUR = "#0072B2"


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """One run's loss by iteration."""

    label: str
    losses: Mapping[int, float]


def draw_curves(
    path: Path, *, first: LossCurve, second: LossCurve, title: str, tolerance: float, unit: str
) -> Path:
    """Draw both curves and `second - first`; they must have the same iterations.

    `tolerance`: the largest difference that counts as equal; `unit`: of the losses.
    """
    figure = new_figure(width_inches=8, height_inches=5.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    figure.suptitle(title, fontsize=12)
    _draw_losses(upper, first, second, unit)
    _draw_difference(lower, first, second, tolerance)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.align_ylabels()
    return save_figure(figure, path)


def _draw_losses(axes: Axes, first: LossCurve, second: LossCurve, unit: str) -> None:
    # Wide below narrow: where the curves agree, both can still be seen.
    axes.plot(
        list(first.losses),
        list(first.losses.values()),
        color=_FIRST_COLOUR,
        linewidth=6,
        alpha=0.75,
        solid_capstyle="round",
        label=first.label,
    )
    axes.plot(
        list(second.losses),
        list(second.losses.values()),
        color=_SECOND_COLOUR,
        linewidth=1.6,
        marker="o",
        markersize=3,
        label=second.label,
    )
    axes.set_ylabel(f"loss ({unit})")
    axes.legend(frameon=False, loc="upper right")


def _draw_difference(axes: Axes, first: LossCurve, second: LossCurve, tolerance: float) -> None:
    scale = 1e6  # an axis in millionths needs no offset text
    differences = [(second.losses[each] - loss) * scale for each, loss in first.losses.items()]
    largest = max(map(abs, differences), default=0.0)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.plot(list(first.losses), differences, color=_SECOND_COLOUR, marker="o", markersize=3)
    axes.set_ylabel("difference (10⁻⁶)")
    axes.set_xlabel("iteration")
    # Room for the note above the points.
    axes.set_ylim(-1.3 * (largest or 1), 2.0 * (largest or 1))
    axes.text(
        0.995,
        0.97,
        f"largest: {largest / scale:.1e}   allowed: {tolerance:.0e}",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=9,
        color=FAINT,
    )


# A page of an answer that needs no other file: pictures are in it, nothing is loaded.


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 1120px; margin: 0 auto; }
body { padding: 32px 24px; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
p { margin: 4px 0; }
table { border-collapse: collapse; width: 100%; margin: 16px 0; }
th, td { text-align: left; vertical-align: top; padding: 6px 10px 6px 0; }
th, td { border-bottom: 1px solid #e3e8ee; }
img { width: 100%; }
"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG with what it shows."""

    title: str
    png: bytes


def html_page(title: str, shown: Iterable[str | Table | Picture]) -> str:
    """Return the page: a paragraph for each line, tables and pictures; all texts are escaped."""
    parts = "\n".join(map(_part, shown))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def _part(shown: str | Table | Picture) -> str:
    if isinstance(shown, str):
        return f"<p>{escape(shown)}</p>"
    if isinstance(shown, Picture):
        data = b64encode(shown.png).decode()
        title = escape(shown.title)
        return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{data}">'
    head = _row("th", [column.header for column in shown.columns])
    columns = [list(column.cells) for column in shown.columns]
    rows = "\n".join(_row("td", cells) for cells in zip(*columns, strict=True))
    return f"<table>\n{head}\n{rows}\n</table>"


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"
