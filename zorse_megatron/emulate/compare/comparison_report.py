"""The comparison as files: `compare.json`, pictures, and one page that needs no other file."""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorse_megatron.emulate.compare.compared_systems import OURS
from zorse_megatron.emulate.compare.comparison import ComparisonRow, Result, as_json, rows_of
from zorse_megatron.files.write import write_text
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.plots.comparison_figures import Bar, Panel, draw_bars, draw_panels

FILES = ("compare.json", "bars.png", "timeline.png", "compare.html")
"""What `ComparisonReport.save` writes; no timeline where nothing ran."""
HEADINGS = (
    "System",
    "Layout",
    "Iteration",
    "Tokens/s",
    "Against stock",
    "Of aggregate",
    "Simulated",
    "Final loss",
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
        """Compute the rows; each self-test, and who ran out of memory where, becomes a note."""
        runs = {r.compared.name: r.run for r in results if r.run is not None}
        tests = {str(run.self_test): name for name, run in runs.items()}
        full = [f"{name}: {run.out_of_memory}" for name, run in runs.items() if run.out_of_memory]
        return cls(
            title=title,
            results=tuple(results),
            rows=tuple(rows_of(results, inputs)),
            notes=(*full, *(f"{name}: {test}" for test, name in tests.items()), *notes),
            kinds=inputs.kinds,
        )

    def table(self) -> list[tuple[str, ...]]:
        """Cells for people, in the order of `HEADINGS`."""
        return [_cells(row, r.outcome) for row, r in zip(self.rows, self.results, strict=True)]

    def save(self, directory: Path) -> list[Path]:
        """Write all files; returns their paths."""
        values, bars, timeline, page = (directory / name for name in FILES)
        write_text(values, json.dumps(as_json(self.rows), indent=2) + "\n", parents=True)
        pictures = [draw_bars(bars, self._bars(), title=self.title)]
        if panels := self._panels():
            title = "One iteration of an emulated cluster, on one scale"
            pictures.append(draw_panels(timeline, panels, title=title))
        write_text(page, self._page(pictures))
        return [values, *pictures, page]

    def _bars(self) -> list[Bar]:
        return [
            Bar(
                label=row.system,
                tokens_per_s=row.tokens_per_s,
                note=result.outcome,
                is_ours=row.system == OURS,
            )
            for row, result in zip(self.rows, self.results, strict=True)
        ]

    def _panels(self) -> list[Panel]:
        """Stock's fastest layout that ran, and ours below it."""
        ran = [r for r in self.results if r.run is not None and not r.outcome]
        stock = [r for r in ran if r.compared.name.startswith("stock")]
        ours = [r for r in ran if r.compared.name == OURS]
        shown = [min(stock, key=_iteration_s)] if stock else []
        return [_panel(result, self.kinds) for result in (*shown, *ours)]

    def _page(self, pictures: Sequence[Path]) -> str:
        head = "".join(f"<th>{html.escape(each)}</th>" for each in HEADINGS)
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


def _iteration_s(result: Result) -> float:
    assert result.run is not None
    return result.run.iteration_s


def _panel(result: Result, kinds: Sequence[str]) -> Panel:
    run = result.run
    assert run is not None
    return Panel(
        title=f"{result.compared.name}: {result.compared.layout}",
        rows=[f"{kinds[gpu]}, GPU {gpu}" for gpu in run.system.gpus],
        spans=run.spans,
        start_s=sum(run.iterations_s[:-1]),
    )


def _cells(row: ComparisonRow, outcome: str) -> tuple[str, ...]:
    if row.iteration_s_median is None:
        return (row.system, row.layout, outcome or "-", *["-"] * (len(HEADINGS) - 3))
    simulated = _said(row.predicted_iteration_s, "{:.4g} s")
    if row.prediction_error is not None:
        simulated += f" ({100 * row.prediction_error:+.1f} %)"
    mark = "" if row.valid else " (NOT VALID)"
    return (
        row.system,
        row.layout,
        f"{row.iteration_s_median:.4g} s{mark}",
        _said(row.tokens_per_s, "{:,.0f}"),
        _said(row.speedup_vs_stock, "{:.2f} x"),
        _said(row.efficiency_of_aggregate, "{:.2f}"),
        simulated,
        _said(row.final_loss, "{:.5f}"),
    )


def _said(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
