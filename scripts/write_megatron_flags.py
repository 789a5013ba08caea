"""Writes zorse_megatron/flags/megatron_flags.json: every flag of the installed Megatron's parser.

Run it after a change of the Megatron version; tests/megatron/test_flag_table.py compares the file
with the parser, and tests/unit/test_flag_rows.py says which new flags have no verdict yet.
"""

import argparse
import json

from zorse_megatron.adapter.stock_parser import flags_of_parser
from zorse_megatron.flags.table import TABLE_FILE


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = ",\n".join(json.dumps(flag, sort_keys=True) for flag in flags_of_parser())
    TABLE_FILE.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
