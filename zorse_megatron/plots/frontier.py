"""Speed and price of selections of GPUs, with the line of those that no other one beats."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.plots.figure import FAINT, TEXT, new_figure, save_figure

_BEST = "#0072B2"
_CHOSEN = "#D55E00"
_OTHERS = "#B0B0B0"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One selection."""

    label: str
    tokens_per_s: float
    price_per_gtoken: float | None
    """None for all of them: they are drawn over the number of GPUs."""
    num_gpus: int
    is_best: bool
    """Whether no other one is as fast and as cheap."""
    is_chosen: bool


def draw_frontier(path: Path, dots: Sequence[Dot], *, title: str) -> Path:
    """Draw price (or number of GPUs) across, tokens/s up, and write the picture."""
    priced = all(dot.price_per_gtoken is not None for dot in dots)

    def across(dot: Dot) -> float:
        return dot.price_per_gtoken or 0.0 if priced else float(dot.num_gpus)

    figure = new_figure(width_inches=8, height_inches=5)
    axes = figure.subplots()
    axes.set_title(title, fontsize=12)
    best = sorted((dot for dot in dots if dot.is_best), key=across)
    axes.plot([across(dot) for dot in best], [dot.tokens_per_s for dot in best], color=_BEST)
    for dot in dots:
        colour = _CHOSEN if dot.is_chosen else _BEST if dot.is_best else _OTHERS
        axes.scatter(across(dot), dot.tokens_per_s, color=colour, zorder=3)
        if dot.is_best or dot.is_chosen:
            axes.annotate(
                dot.label,
                (across(dot), dot.tokens_per_s),
                textcoords="offset points",
                xytext=(6, -10),
                fontsize=8,
                color=TEXT if dot.is_chosen else FAINT,
            )
    axes.set_xlabel("price of 10^9 tokens" if priced else "GPUs")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return save_figure(figure, path)
