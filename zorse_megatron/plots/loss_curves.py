"""Two loss curves over one another, and their difference below."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from zorse_megatron.plots.figure import FAINT, new_figure, save_figure

_FIRST_COLOUR = "#E69F00"
_SECOND_COLOUR = "#0072B2"


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """One run's loss by iteration."""

    label: str
    iterations: Sequence[int]
    losses: Sequence[float]


def draw_curves(
    path: Path, *, first: LossCurve, second: LossCurve, title: str, tolerance: float, unit: str
) -> Path:
    """Draw both curves and `second - first`; they must have the same iterations.

    `tolerance`: the largest difference that counts as equal; `unit`: of the losses.
    """
    if tuple(first.iterations) != tuple(second.iterations):
        raise ValueError(
            f"found {len(first.iterations)} and {len(second.iterations)} iterations, or other "
            "ones; expected two curves over the same iterations"
        )
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
        first.iterations,
        first.losses,
        color=_FIRST_COLOUR,
        linewidth=6,
        alpha=0.75,
        solid_capstyle="round",
        label=first.label,
    )
    axes.plot(
        second.iterations,
        second.losses,
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
    differences = [(b - a) * scale for a, b in zip(first.losses, second.losses, strict=True)]
    largest = max(map(abs, differences), default=0.0)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    axes.plot(first.iterations, differences, color=_SECOND_COLOUR, marker="o", markersize=3)
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
