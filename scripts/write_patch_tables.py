"""Writes the tables of rebound names into docs/, from the records of the registry.

Run it after a change of zorse_megatron/adapter/patches; tests/unit/test_imports.py
compares.
"""

import argparse
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.registry import OF_A_RUN, OF_AN_EMULATED_RUN

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin: names that are rebound (scripts/write_patch_tables.py) -->\n"
END = "<!-- end: names that are rebound -->\n"
SHOWN_IN: Mapping[str, Mapping[str, Sequence[Rebinding]]] = {
    "docs/how-it-works.md": OF_A_RUN,
    "docs/emulation.md": OF_AN_EMULATED_RUN,
}
"""Document -> what it shows."""

_IN_CODE = re.compile(r"(?<![`\w-])(--[\w-]+|\w*[a-z]_[a-z]\w*)")


def with_tables(text: str, situations: Mapping[str, Sequence[Rebinding]]) -> str:
    """Return the text of a document with the tables between its two marks.

    Raises ValueError where it has not exactly one place for them.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in before:
        raise ValueError(f"found no single place between {BEGIN!r} and {END!r}")
    tables = [f"{when}:\n\n{_table(records)}\n" for when, records in situations.items()]
    return "".join([before, BEGIN, "\n", *tables, END, after])


def _table(records: Sequence[Rebinding]) -> str:
    rows = [
        " | ".join([", ".join(f"`{each.target}`" for each in alike), becomes, _sentence(why)])
        for (becomes, why), alike in itertools.groupby(records, lambda r: (r.becomes, r.why))
    ]
    head = "| Name | What takes its place | Why |\n|---|---|---|\n"
    return head + "".join(f"| {row} |\n" for row in rows)


def _sentence(why: str) -> str:
    text = _IN_CODE.sub(r"`\1`", why)
    return f"{text[0].upper()}{text[1:]}."


def main() -> None:
    """Write the documents."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, situations in SHOWN_IN.items():
        document = ROOT / name
        text = document.read_text(encoding="utf-8")
        document.write_text(with_tables(text, situations), encoding="utf-8")


if __name__ == "__main__":
    main()
