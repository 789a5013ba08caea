"""Writes zorse_megatron/flags/megatron_flags.json: every flag of the installed Megatron's parser.

Run it after a change of the Megatron version; tests/megatron/test_flag_table.py compares the file
with the parser, and tests/unit/test_flag_rows.py says which new flags have no verdict yet.
"""

import argparse
import enum
import json
from typing import Any

from zorse_megatron.adapter import cpu_mode
from zorse_megatron.flags.table import TABLE_FILE, as_json

_TYPES: dict[Any, str] = {int: "int", float: "float", str: "str", None: "str"}


def stock_parser() -> argparse.ArgumentParser:
    """The parser that `megatron.training.arguments.parse_args` makes. Imports Megatron."""
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser


def flags_of_parser() -> list[dict[str, Any]]:
    """Every flag, in JSON values; see `zorse_megatron.flags.table.Flag`."""
    actions = stock_parser()._actions
    return [_as_json(each) for each in actions if each.option_strings and each.dest != "help"]


def _as_json(action: argparse.Action) -> dict[str, Any]:
    kind, converter = _kind_of(action)
    choices = action.choices
    return {
        "spellings": list(action.option_strings),
        "name": action.dest,
        "kind": kind,
        "nargs": action.nargs if kind == "store" else 0,
        "type": converter,
        "choices": None if choices is None else [as_json(each) for each in choices],
        # Of the launcher's environment, not of the parser.
        "default": 0 if action.dest == "local_rank" else as_json(action.default),
    }


def _kind_of(action: argparse.Action) -> tuple[str, str | None]:
    kinds = {"_StoreTrueAction": "true", "_StoreFalseAction": "false"}
    name = type(action).__name__
    if name in kinds:
        return kinds[name], None
    if isinstance(action, argparse.BooleanOptionalAction):
        return "boolean", None
    if name != "_StoreAction":
        raise ValueError(f"found a flag {action.option_strings[0]} of kind {name}; expected store")
    choices = list(action.choices or ())
    if choices and isinstance(choices[0], enum.Enum):
        return "store", "name"
    return "store", _TYPES.get(action.type, "opaque")


def main() -> None:
    """Write the file."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = ",\n".join(json.dumps(flag, sort_keys=True) for flag in flags_of_parser())
    TABLE_FILE.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
