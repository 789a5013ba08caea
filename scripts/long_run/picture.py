"""Tokens per second over time, against a plan that always knew."""

from collections.abc import Sequence
from pathlib import Path

from scripts.long_run.parts import Part, spans
from zorse_megatron.plots.figures import FAINT, new_figure, save_figure

_OURS, _ORACLE = "#0072B2", "#009E73"


def draw(path: Path, parts: Sequence[Part], *, tokens: int) -> Path:
    """Draw the run. `tokens`: of an iteration."""
    figure = new_figure(width_inches=9, height_inches=4.2)
    axes = figure.subplots()
    edges, rates, oracle = [0.0], [], []
    for span in spans(parts):
        part = parts[span.part]
        edges.append(span.end_s)
        if span.iteration is None:
            rates.append(0.0)
            oracle.append(tokens / part.oracle_s[0])
            continue
        offset = span.iteration - part.first_iteration
        rates.append(tokens / (span.end_s - span.start_s))
        oracle.append(tokens / part.oracle_s[offset])
    axes.stairs(oracle, edges, color=_ORACLE, linewidth=2, label="a plan that knew")
    axes.stairs(rates, edges, color=_OURS, linewidth=1.2, label="this run")
    starts = {span.part: span.start_s for span in reversed(list(spans(parts)))}
    told = ""
    for number, part in enumerate(parts):
        if part.label != told:
            where = (starts[number], 1.02)
            axes.annotate(part.label, where, xycoords=("data", "axes fraction"), fontsize=9)
        told = part.label
    axes.set_xlabel("seconds", color=FAINT)
    axes.set_ylabel("tokens/s", color=FAINT)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower center")
    return save_figure(figure, path)
