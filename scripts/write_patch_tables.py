"""Writes the tables of rebound names into docs/, from the records of the registry.

Run it after a change of zorse_megatron/adapter/patches; tests/unit/test_patch_registry.py
compares.
"""

import argparse
from pathlib import Path

from zorse_megatron.adapter.patches.in_words import SHOWN_IN, with_tables

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write the documents."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, situations in SHOWN_IN.items():
        document = ROOT / name
        text = document.read_text(encoding="utf-8")
        document.write_text(with_tables(text, situations), encoding="utf-8")


if __name__ == "__main__":
    main()
