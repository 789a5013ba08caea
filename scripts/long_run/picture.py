"""Tokens per second over time, against a plan that always knew."""

from collections.abc import Sequence
from pathlib import Path

from scripts.long_run.parts import Part, spans
from zorse_megatron.plots.figure import FAINT, new_figure, save_figure

_OURS, _ORACLE, _UNCHANGED = "#0072B2", "#009E73", "#D55E00"


def draw(path: Path, parts: Sequence[Part], *, tokens: int) -> Path:
    """Draw the run. `tokens`: of an iteration."""
    figure = new_figure(width_inches=9, height_inches=4.2)
    axes = figure.subplots()
    edges, rates, oracle, unchanged = [0.0], [], [], []
    for span in spans(parts):
        part = parts[span.part]
        edges.append(span.end_s)
        if span.iteration is None:
            rates.append(0.0)
            oracle.append(tokens / part.oracle_s[0])
            unchanged.append(0.0)
            continue
        offset = span.iteration - part.first_iteration
        rates.append(tokens / (span.end_s - span.start_s))
        oracle.append(tokens / part.oracle_s[offset])
        unchanged.append(tokens / part.unchanged_s[offset])
    axes.stairs(oracle, edges, color=_ORACLE, linewidth=2, label="a plan that knew")
    axes.stairs(unchanged, edges, color=_UNCHANGED, linestyle=":", label="counts as planned")
    axes.stairs(rates, edges, color=_OURS, linewidth=1.2, label="this run")
    starts = {span.part: span.start_s for span in reversed(list(spans(parts)))}
    for number, part in enumerate(parts):
        axes.annotate(part.label, (starts[number], 0.02), xycoords=("data", "axes fraction"))
    axes.set_xlabel("seconds", color=FAINT)
    axes.set_ylabel("tokens/s", color=FAINT)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    return save_figure(figure, path)
