"""Prints the tables of flags in docs/limits.md; tests/unit/test_docs.py compares.

Run it after a change of zorse_megatron/flags/flags.yaml, and put there what differs.
"""

import argparse
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from zorse_megatron.flags.table import Row, expanded, rows, spelling_of


def decided_table() -> str:
    """What the plan decides, as a Markdown table."""
    return _table(
        ("What the plan decides", "Flags"),
        [_row(each) for each in rows() if each.under_plan == "decided"],
    )


def refused_table() -> str:
    """What does not work under a plan, as a Markdown table."""
    listed = [(*_row(each), _accepted(each)) for each in rows() if each.under_plan == "refused"]
    return _table(("What it is", "Flags", "Values that are accepted"), listed)


def _table(head: Sequence[str], listed: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *listed]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---")


def _row(family: Row) -> tuple[str, str]:
    return family.what, ", ".join(f"`{each}`" for each in _spellings(family))


def _spellings(family: Row) -> Iterator[str]:
    """Each flag, or a star for several that begin alike."""
    for entry in family.flags.split():
        spelt = [spelling_of(name) for name in expanded(entry)]
        if entry.endswith("*"):
            star = "--" + entry.replace("_", "-")
            yield star
            spelt = [each for each in spelt if not fnmatchcase(each, star)]
        yield from spelt


def _accepted(family: Row) -> str:
    return " or ".join(f"`{each}`" for each in family.accepted) or "default"


def main() -> None:
    """Print both tables."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(refused_table(), decided_table(), sep="\n", end="")


if __name__ == "__main__":
    main()
