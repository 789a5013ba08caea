"""The comparison as files: `compare.json`, pictures, and one page that needs no other file."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorse_megatron.emulate.compare.compared_systems import OURS, STOCK
from zorse_megatron.emulate.compare.comparison import ComparisonRow, Result, rows_of
from zorse_megatron.emulate.jobs.emulator import EmulatedRun
from zorse_megatron.files.write import write_text
from zorse_megatron.planner.inputs.search_inputs import Inputs

if TYPE_CHECKING:
    from zorse_megatron.plots.comparison_figures import Bar, Panel

FILES = ("compare.json", "bars.png", "timeline.png", "compare.html")
"""What `ComparisonReport.save` writes; no timeline where nothing ran."""
HEADINGS = (
    "System",
    "Layout",
    "Iteration",
    "Tokens/s",
    "Against stock",
    "Of aggregate",
    "Memory",
    "Simulated",
    "Loss",
)
_STYLE = (
    "body{font:15px sans-serif;color:#222;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border-bottom:1px solid #ddd;padding:.4em .8em;"
    "text-align:left}img{max-width:100%}"
)


@dataclass(frozen=True, kw_only=True)
class ComparisonReport:
    """Everything that is written and printed."""

    title: str
    results: tuple[Result, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    kinds: tuple[str, ...]
    """GPU -> its kind."""

    @classmethod
    def of(
        cls, results: Sequence[Result], inputs: Inputs, *, title: str, notes: Sequence[str]
    ) -> "ComparisonReport":
        """Compute the rows; who has no number and why, and each self-test, becomes a note."""
        runs = {r.compared.name: r.run for r in results if r.run is not None}
        tests = {str(run.self_test): name for name, run in runs.items()}
        full = {name: run.out_of_memory for name, run in runs.items() if run.out_of_memory}
        why = {r.compared.name: r.compared.reason for r in results if r.compared.reason} | full
        return cls(
            title=title,
            results=tuple(results),
            rows=tuple(rows_of(results, inputs)),
            notes=(
                *(f"{name}: {reason}" for name, reason in why.items()),
                *(f"{name}: {test}" for test, name in tests.items()),
                *notes,
            ),
            kinds=inputs.kinds,
        )

    @property
    def headings(self) -> tuple[str, ...]:
        """Of `table`; of what is simulated only nothing else can be said."""
        return HEADINGS if any(r.is_emulated for r in self.results) else HEADINGS[:-2]

    def table(self) -> list[tuple[str, ...]]:
        """Cells for people, in the order of `headings`."""
        number = len(self.headings)
        pairs = zip(self.rows, self.results, strict=True)
        return [_cells(row, result.outcome)[:number] for row, result in pairs]

    def as_json(self) -> list[dict[str, Any]]:
        """Rows as plain values."""
        return [asdict(row) for row in self.rows]

    def save(self, directory: Path) -> list[Path]:
        """Write all files; returns their paths."""
        from zorse_megatron.plots.comparison_figures import draw_bars, draw_panels

        values, bars, timeline, page = (directory / name for name in FILES)
        write_text(values, json.dumps(self.as_json(), indent=2) + "\n", parents=True)
        pictures = [draw_bars(bars, self._bars(), title=self.title)]
        if panels := self._panels():
            title = "One iteration of an emulated cluster, on one scale"
            pictures.append(draw_panels(timeline, panels, title=title))
        write_text(page, self._page(pictures))
        return [values, *pictures, page]

    def _bars(self) -> "list[Bar]":
        from zorse_megatron.plots.comparison_figures import Bar

        return [
            Bar(
                label=row.system,
                tokens_per_s=row.tokens_per_s,
                note=result.outcome,
                is_ours=row.system == OURS,
            )
            for row, result in zip(self.rows, self.results, strict=True)
        ]

    def _panels(self) -> "list[Panel]":
        """Stock's best layout if it ran, and ours below it."""
        ran = {r.compared.name: r.run for r in self.results if r.run and not r.outcome}
        layouts = {row.system: row.layout for row in self.rows}
        return [
            _panel(f"{name}: {layouts[name]}", ran[name], self.kinds)
            for name in (STOCK, OURS)
            if name in ran
        ]

    def _page(self, pictures: Sequence[Path]) -> str:
        head = "".join(f"<th>{html.escape(each)}</th>" for each in self.headings)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
            for cells in self.table()
        )
        images = "".join(
            f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,'
            f'{base64.b64encode(path.read_bytes()).decode()}"></p>'
            for path in pictures
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>'
            f"{html.escape(self.title)}</title><style>{_STYLE}</style>"
            f"<h1>{html.escape(self.title)}</h1><table><tr>{head}</tr>{body}</table>"
            f"{images}<ul>{notes}</ul></html>\n"
        )


def _panel(title: str, run: EmulatedRun, kinds: Sequence[str]) -> "Panel":
    from zorse_megatron.plots.comparison_figures import Panel

    return Panel(
        title=title,
        rows=[f"{kinds[gpu]}, GPU {gpu}" for gpu in run.system.gpus],
        spans=run.spans,
        start_s=sum(run.iterations_s[:-1]),
    )


def _cells(row: ComparisonRow, outcome: str) -> tuple[str, ...]:
    if row.iteration_s is None:
        return (row.system, row.layout, outcome, *["-"] * (len(HEADINGS) - 3))
    simulated = _said(row.predicted_iteration_s, "{:.4g} s")
    if row.prediction_error is not None:
        simulated += f" ({100 * row.prediction_error:+.1f} %)"
    mark = " (NOT VALID)" if row.valid is False else ""
    return (
        row.system,
        row.layout,
        f"{row.iteration_s:.4g} s{mark}",
        _said(row.tokens_per_s, "{:,.0f}"),
        _said(row.speedup_vs_stock, "{:.2f} x"),
        _said(row.efficiency_of_aggregate, "{:.2f}"),
        _said(row.peak_memory_fraction, "{:.0%}").replace("%", " %"),
        simulated,
        _said(row.final_loss, "{:.5f}"),
    )


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
