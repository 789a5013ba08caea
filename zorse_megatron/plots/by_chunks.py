"""Memory and time against the number of chunks per group, one line for each setting."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes

from zorse_megatron.plots.figure import FAINT, new_figure, save_figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


@dataclass(frozen=True, kw_only=True)
class ChunkLine:
    """One setting; entries are by `chunks`, those of `measured` by `measured_chunks`."""

    label: str
    chunks: Sequence[int]
    predicted: Sequence[float]
    """Share of the stage's unsharded parameters and gradients."""
    iteration_s: Sequence[float]
    measured_chunks: Sequence[int] = ()
    measured: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Level:
    """A share that does not depend on the number of chunks, drawn as a thin line."""

    label: str
    share: float


def draw_by_chunks(
    path: Path, lines: Sequence[ChunkLine], levels: Sequence[Level], *, title: str, time_title: str
) -> Path:
    """Draw memory on the left (lines: predicted, circles: measured) and time on the right.

    Raises ValueError for a line whose entries do not belong together.
    """
    for line in lines:
        _check(line)
    figure = new_figure(width_inches=10.5, height_inches=4.6)
    left, right = figure.subplots(1, 2)
    for line, colour in zip(lines, _COLOURS, strict=False):
        left.plot(line.chunks, line.predicted, color=colour, label=line.label)
        left.plot(line.measured_chunks, line.measured, "o", color=colour, markersize=6)
        right.plot(line.chunks, line.iteration_s, marker=".", color=colour)
    for level in levels:
        _draw_level(left, level, at=max(max(line.chunks) for line in lines))
    left.set_title(title, fontsize=10, loc="left")
    left.set_ylabel("peak parameters + gradients\n(share of the whole stage's)")
    left.set_ylim(0, 1.08)
    right.set_title(time_title, fontsize=10, loc="left")
    right.set_ylabel("iteration (s, simulated)")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("chunks per group")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    left.plot([], [], "o", color=FAINT, label="measured")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return save_figure(figure, path)


def _draw_level(axes: Axes, level: Level, *, at: int) -> None:
    axes.axhline(level.share, color=FAINT, linewidth=0.9, linestyle=":")
    axes.annotate(
        level.label,
        (at, level.share),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=FAINT,
    )


def _check(line: ChunkLine) -> None:
    lengths = len(line.chunks), len(line.predicted), len(line.iteration_s)
    if len(set(lengths)) > 1 or len(line.measured) != len(line.measured_chunks):
        raise ValueError(
            f"found {lengths} entries of {line.label!r}, and {len(line.measured)} measured at "
            f"{len(line.measured_chunks)} numbers of chunks; expected one for each"
        )
