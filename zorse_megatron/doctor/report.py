"""The report: `doctor.json` for programs, `doctor.html` for people."""

import html
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorse_megatron.doctor.finding import CheckResult, Figure, Status
from zorse_megatron.doctor.machine import NO_CUDA, Machine
from zorse_megatron.files.write import write_text
from zorse_megatron.schema.gpus.compute_capability import spell

FILES = ("doctor.json", "doctor.html")
_STYLE = (
    "body{font:15px sans-serif;color:#222;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}"
    "td,th{border-bottom:1px solid #ddd;padding:.4em .8em;text-align:left;vertical-align:top}"
    "pre{white-space:pre-wrap;margin:0;font:inherit}small{color:#666}"
    ".pass{color:#1a7f37}.fail{color:#b3261e;font-weight:bold}.not{color:#666}"
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results, and where they were found."""

    machine: Machine
    results: tuple[CheckResult, ...]
    version: str

    @property
    def has_failed(self) -> bool:
        """Whether any check has."""
        return any(each.finding.status == Status.FAIL for each in self.results)

    @property
    def summary(self) -> str:
        """How many checks ended how."""
        counts = Counter(each.finding.status for each in self.results)
        return ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])

    @property
    def place(self) -> str:
        """The machine in a line."""
        machine = self.machine
        counts = Counter((gpu.name, gpu.capability) for gpu in machine.gpus)
        gpus = ", ".join(
            f"{count} x {name} (compute capability {spell(capability)})"
            for (name, capability), count in counts.items()
        )
        engine = machine.transformer_engine or "not installed"
        return f"{gpus or NO_CUDA}; torch {machine.torch}; Transformer Engine {engine}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "ok": not self.has_failed,
            "summary": self.summary,
            "version": self.version,
            "machine": self.machine.as_json(),
            "checks": [each.as_json() for each in self.results],
        }

    def save(self, directory: Path) -> list[Path]:
        """Write both files; returns their paths. Raises OutputError."""
        values, page = (directory / name for name in FILES)
        write_text(values, json.dumps(self.as_json(), indent=1) + "\n", parents=True)
        write_text(page, self._page())
        return [values, page]

    def _page(self) -> str:
        rows = "".join(map(_row, self.results))
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>zorse doctor</title>'
            f"<style>{_STYLE}</style><h1>zorse doctor: {html.escape(self.summary)}</h1>"
            f"<p>{html.escape(self.place)}; zorse-megatron {html.escape(self.version)}</p>"
            "<table><tr><th>Check<th>Result<th>Found<th>Time</tr>"
            f"{rows}</table></html>\n"
        )


def _row(result: CheckResult) -> str:
    finding = result.finding
    figures = ", ".join(f"{name} {spell_figure(v)}" for name, v in finding.figures.items())
    return (
        f"<tr><td>{html.escape(result.title)}"
        f'<td class="{finding.status.partition(" ")[0]}">{finding.status}'
        f"<td><pre>{html.escape(finding.said)}</pre><small>{html.escape(figures)}</small>"
        f"<td>{result.duration_s:.1f} s</tr>"
    )


def spell_figure(value: Figure) -> str:
    """A measured value for people."""
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"
