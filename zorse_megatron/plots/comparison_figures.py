"""Pictures of a comparison: tokens/s as bars, and what the GPUs of two systems do meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from zorse_megatron.plots.figure import FAINT, TEXT, new_figure, save_figure

_BAR = "#0072B2"
_OTHERS = "#B0B0B0"
_COLOURS = {"F": "#56B4E9", "B": "#E69F00", "STEP": "#8C2D04"}
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
    figure = new_figure(width_inches=9, height_inches=1.4 + 0.5 * len(bars))
    axes = figure.subplots()
    axes.set_title(title, fontsize=12, loc="left")
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
    handles = [Patch(color=_COLOURS[kind], label=label) for kind, label in _LABELS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save_figure(figure, path, description="\n".join(_said(panel) for panel in panels))


def _said(panel: Panel) -> str:
    """What a panel shows, for those who cannot see it: its title and its ranks."""
    return f"{panel.title} ({', '.join(panel.rows)})"


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    for row, spans in enumerate(panel.spans):
        for kind, colour in _COLOURS.items():
            pieces = [(start - panel.start_s, end - start) for k, start, end in spans if k == kind]
            axes.broken_barh(pieces, (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(panel.rows)), panel.rows, fontsize=8)
    axes.set_ylim(len(panel.rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=FAINT, labelcolor=TEXT)
