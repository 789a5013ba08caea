"""A page of an answer that needs no other file: pictures are in it, nothing is loaded."""

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from rich.table import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 1120px; margin: 0 auto; }
body { padding: 32px 24px; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
p { margin: 4px 0; }
table { border-collapse: collapse; width: 100%; margin: 16px 0; }
th, td { text-align: left; vertical-align: top; padding: 6px 10px 6px 0; }
th, td { border-bottom: 1px solid #e3e8ee; }
img { width: 100%; }
"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A PNG with what it shows."""

    title: str
    png: bytes


def html_page(title: str, shown: Iterable[str | Table | Picture]) -> str:
    """Return the page: a paragraph for each line, tables and pictures; all texts are escaped."""
    parts = "\n".join(map(_part, shown))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{parts}\n</body>\n</html>\n"
    )


def _part(shown: str | Table | Picture) -> str:
    if isinstance(shown, str):
        return f"<p>{escape(shown)}</p>"
    if isinstance(shown, Picture):
        data = b64encode(shown.png).decode()
        title = escape(shown.title)
        return f'<h2>{title}</h2>\n<img alt="{title}" src="data:image/png;base64,{data}">'
    head = _row("th", [column.header for column in shown.columns])
    columns = [list(column.cells) for column in shown.columns]
    rows = "\n".join(_row("td", cells) for cells in zip(*columns, strict=True))
    return f"<table>\n{head}\n{rows}\n</table>"


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"
