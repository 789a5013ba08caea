"""Tables and picture of scripts/bench_stock.py."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.where_time_goes import LOSSES

BEGIN = "<!-- begin: against stock (scripts/bench_stock.py --write-docs) -->\n"
END = "<!-- end: against stock -->\n"
SYSTEMS = {"even": "stock, best even layout", "best": "stock, best layout", "ours": "zorse"}

Row = dict[str, Any]
"""What is found of one cluster, as plain values."""


def gain(row: Row) -> float | None:
    """How many times as fast as stock's best layout ours is; None where none fits."""
    return _ratio(row["best"]["iteration_s"], row["ours"]["iteration_s"])


def _ratio(more: float | None, less: float | None) -> float | None:
    return more / less if more and less else None


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """Return the text of the document with the tables between its two marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + tables(rows) + "\n\n" + END + rest.split(END)[1]


def tables(rows: Sequence[Row]) -> str:
    """All tables, in Markdown."""
    ran = [row for row in rows if "emulated" in row]
    parts = [_speeds(rows), _summary(rows), _losses(rows), *([_emulations(ran)] if ran else [])]
    return "\n\n".join(parts)


def _speeds(rows: Sequence[Row]) -> str:
    head = ["Cluster, simulated", "Trains", *(f"{name}, s" for name in SYSTEMS.values())]
    head += ["zorse against best", "by the runtime", "zorse against even"]
    head += ["Of summed speed: best", "zorse"]
    return _table(head, map(_speed_cells, rows))


def _speed_cells(row: Row) -> Iterator[str]:
    train, ours_s = row["train"], row["ours"]["iteration_s"]
    best_s, moved_s = row["best"]["iteration_s"], row.get("best_on_our_runtime_s")
    yield f"{row['name']}: {row['what']}"
    yield f"{train['model']}, {train['global_batch_size']} x {train['seq_length']}"
    for system in SYSTEMS:
        yield _said(row[system]["iteration_s"], "{:.4g}", "does not fit")
    for pair in ((best_s, ours_s), (best_s, moved_s)):
        yield _said(_ratio(*pair), "{:.3f}")
    yield _said(_ratio(row["even"]["iteration_s"], ours_s), "{:.2f}")
    for each_s in (best_s, ours_s):
        yield _said(_ratio(row["ideal_s"], each_s), "{:.2f}")


def _summary(rows: Sequence[Row]) -> str:
    told = [f"{what}: {figures}" for what, figures in medians(rows).items()]
    return f"Medians of speed, and ranges, over {len(rows)} clusters: {'; '.join(told)}."


def medians(rows: Sequence[Row]) -> dict[str, str]:
    """What is compared -> median and range of how many times as fast the faster one is."""
    pairs = {
        "our plan against stock's best layout": ("best", "ours"),
        "our plan against stock's best even layout": ("even", "ours"),
        "stock's best layout against its best even one": ("even", "best"),
    }
    told = {}
    for what, (slow, fast) in pairs.items():
        found = [_ratio(row[slow]["iteration_s"], row[fast]["iteration_s"]) for row in rows]
        known = sorted(each for each in found if each is not None)
        if known:
            median = statistics.median(known)
            told[what] = f"{median:.2f} ({known[0]:.2f} to {known[-1]:.2f})"
    return told


def _losses(rows: Sequence[Row]) -> str:
    head = ["Lost, median of the clusters, simulated", *LOSSES, "Fullest GPU"]
    cells = [[SYSTEMS[system], *_loss_cells(rows, system)] for system in ("best", "ours")]
    return _table(head, cells)


def _loss_cells(rows: Sequence[Row], system: str) -> list[str]:
    """Medians over the clusters on which the system's layout fits."""
    found = [row[system] for row in rows if row[system]["iteration_s"] is not None]
    if not found:
        return ["-"] * (len(LOSSES) + 1)
    lost = [[each["lost_s"][name] / each["iteration_s"] for each in found] for name in LOSSES]
    shares = map(statistics.median, (*lost, [each["fullest"] for each in found]))
    return [f"{100 * share:.1f} %".replace("-0.0", "0.0") for share in shares]


def _emulations(rows: Sequence[Row]) -> str:
    """What training on the emulated clusters shows, in a sentence."""
    runs = [found for row in rows for found in row["emulated"].values()]
    gains = [
        _ratio(row["emulated"]["best"]["iteration_s"], row["emulated"]["ours"]["iteration_s"])
        for row in rows
        if row["emulated"].keys() >= {"best", "ours"}
    ]
    known = sorted(each for each in gains if each is not None)
    ours = (
        f"our plan against stock's best layout {statistics.median(known):.2f} "
        f"({known[0]:.2f} to {known[-1]:.2f}); "
        if known
        else ""
    )
    time, memory = (
        max((abs(each[f"{what}_error"]) for each in runs if f"{what}_error" in each), default=0.0)
        for what in ("time", "memory")
    )
    return (
        f"Emulated on CPU, {len(rows)} of the clusters: {ours}the simulator is off by at most "
        f"{100 * time:.2f} % of an iteration and {100 * memory:.2f} % of a rank's peak."
    )


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, *rows)]
    lines.insert(1, "|".join(["---"] * len(head)))
    return "\n".join(
        f"| {line} |" if number != 1 else f"|{line}|" for number, line in enumerate(lines)
    )


def _said(value: float | None, form: str, otherwise: str = "-") -> str:
    return otherwise if value is None else form.format(value).replace("%", " %")


def draw(path: Path, rows: Sequence[Row]) -> Path:
    """Draw speeds against stock's best layout, a row for each cluster, the largest gain on top."""
    from zorse_megatron.plots.figures import FAINT, TEXT, new_figure, save_figure

    shown = sorted((row for row in rows if gain(row)), key=lambda row: gain(row) or 0.0)
    figure = new_figure(width_inches=9, height_inches=1.6 + 0.3 * len(shown))
    axes = figure.subplots()
    axes.axvline(1.0, color=FAINT, linewidth=1)
    colours = {"even": "#B0B0B0", "best": "#E69F00", "ours": "#0072B2"}
    for system, colour in colours.items():
        points = [(_ratio(r["best"]["iteration_s"], r[system]["iteration_s"]), r) for r in shown]
        heights = [height for height, (speed, _) in enumerate(points) if speed]
        speeds = [speed for speed, _ in points if speed]
        axes.scatter(speeds, heights, color=colour, label=SYSTEMS[system], zorder=3)
    for height, row in enumerate(shown):
        axes.annotate(
            f"{gain(row):.2f}",
            (gain(row) or 0.0, height),
            xytext=(7, -3),
            color=TEXT,
            textcoords="offset points",
            fontsize=8,
        )
        speeds = [_ratio(row["best"]["iteration_s"], row[s]["iteration_s"]) or 1.0 for s in SYSTEMS]
        axes.plot([min(speeds), max(speeds)], [height, height], color="#DDDDDD", zorder=1)
    axes.set_yticks(range(len(shown)), [row["what"] for row in shown], fontsize=8)
    axes.set_xlabel("tokens/s, simulated; stock Megatron in its best layout is 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=FAINT, labelcolor=TEXT)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return save_figure(figure, path, description=described(rows))


def described(rows: Sequence[Row]) -> str:
    """What the picture shows, for those who cannot see it."""
    lines = []
    for row in rows:
        speeds = [_ratio(row["best"]["iteration_s"], row[s]["iteration_s"]) for s in SYSTEMS]
        cells = zip(SYSTEMS.values(), (_said(each, "{:.2f}") for each in speeds), strict=True)
        lines.append(f"{row['what']}: {', '.join(f'{name} {speed}' for name, speed in cells)}")
    return "\n".join(lines)
