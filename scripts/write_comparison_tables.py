"""Write tables and picture of emulated comparisons into README.md and docs/performance.md.

    python scripts/write_comparison_tables.py DIR

DIR holds `CLUSTER-MODEL/compare.json` of `zorse compare`, for example `mini-b-llama-3b`, from the
commands that docs/performance.md gives. Rows of other clusters and models stay as they are. The
picture is of the first row.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT_TABLE = "| Cluster, model, batch |"
README_TABLE = "| Cluster, emulated on CPU | Model |"
PICTURED = "mini-b-llama-3b"
README_SYSTEMS = ("stock, best even layout", "stock, best layout", "zorse")
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


def main() -> int:
    """Replace the rows of both tables, and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory = parser.parse_args().directory
    found = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(directory.glob("*/compare.json"))
    }
    if (picture := directory / PICTURED / "timeline.png").exists():
        shutil.copy(picture, ROOT / "docs" / "images" / "compare-timeline.png")
    _rewrite(ROOT / "docs" / "performance.md", DOCUMENT_TABLE, found, _document_rows)
    _rewrite(ROOT / "README.md", README_TABLE, found, _readme_rows)
    return 0


def _rewrite(path: Path, header: str, found: dict[str, list[dict[str, Any]]], make: Any) -> None:
    text = path.read_text(encoding="utf-8")
    before, after = text.split(header)
    table, rest = after.split("\n\n", 1)
    head, rule, *lines = table.splitlines()
    rows = "\n".join((head, rule, *make(lines, found)))
    path.write_text(f"{before}{header}{rows}\n\n{rest}", encoding="utf-8")


def _document_rows(lines: list[str], found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Every row of a cluster and model that was run anew, and the others as they are."""
    rows, key = [], ""
    for line in lines:
        what = line.strip("|").split("|")[0].strip()
        if what:
            cluster, model, _ = what.split(", ")
            key = f"{cluster}-{model}"
            rows += [_document_row(what, row) for row in found.get(key, ())][:1]
            rows += [_document_row("", row) for row in found.get(key, ())][1:]
        if key not in found:
            rows.append(line)
    return rows


def _document_row(what: str, row: dict[str, Any]) -> str:
    speedup, part, off = (
        _shown(row[name], text)
        for name, text in (
            ("speedup_vs_stock", "{:.2f} x"),
            ("efficiency_of_aggregate", "{:.2f}"),
            ("prediction_error", "{:+.1%}"),
        )
    )
    cells = (row["system"], _layout(row), _seconds(row, 2), speedup, part, off.replace("%", " %"))
    return f"| {what} | " * bool(what) + "| | " * (not what) + " | ".join(cells) + " |"


def _readme_rows(lines: list[str], found: dict[str, list[dict[str, Any]]]) -> list[str]:
    rows, cluster = [], ""
    for line in lines:
        where, size, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        named = re.search(r"mini-[abc]", where)
        cluster = named[0] if named else cluster
        systems = {row["system"]: row for row in found.get(f"{cluster}-llama-{size.lower()}", ())}
        if systems:
            cells = [_seconds(systems[name], 1) for name in README_SYSTEMS]
            rows.append(" | ".join((f"| {where}", size, *cells)) + " |")
        else:
            rows.append(line)
    return rows


def _seconds(row: dict[str, Any], digits: int) -> str:
    """Seconds to two digits first, as docs/performance.md has them."""
    if row.get("iteration_s") is None:
        return "does not fit" if row["layout"] == "-" else "out of memory"
    return f"{round(row['iteration_s'], 2):.{digits}f} s"


def _shown(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)


def _layout(row: dict[str, Any]) -> str:
    """As the command names it, in short."""
    layout = str(row["layout"])
    groups = re.fullmatch(r"(.+): groups of ([\d|]+), (\d+) chunks?, (\w+)", layout)
    if groups is None:
        return layout.removesuffix(", recompute none")
    number, chunks = len(groups[2].split("|")), int(groups[3])
    said = f"{groups[1]}: {number} group{'s' * (number > 1)}"
    if groups[4] == "interleaved":
        each, more = divmod(chunks, number)
        if more:  # groups have unlike numbers of them
            said += f", {chunks} chunks"
        else:
            said += ", one chunk each" if each == 1 else f" of {_NUMBERS[each]} chunks"
    schedule = {"1f1b": "1F1B", "breadth_first": "breadth first"}.get(groups[4], groups[4])
    return f"{said}, {schedule}"


if __name__ == "__main__":
    raise SystemExit(main())
