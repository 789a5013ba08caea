"""The flags of the installed Megatron, as its own parser has them; which of them a run prints."""

import argparse
import enum
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from zorse_megatron.flags.table import defaults
from zorse_megatron.log import say

_TYPES: dict[Any, str] = {int: "int", float: "float", str: "str", None: "str"}


def stock_parser() -> argparse.ArgumentParser:
    """The parser that `megatron.training.arguments.parse_args` makes. Imports Megatron."""
    from zorse_megatron.adapter import cpu_mode

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


def as_json(value: Any) -> Any:
    """A default or a parsed value; of an enumeration its name."""
    if isinstance(value, enum.Enum):
        return value.name
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value


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


# Which arguments a run prints at its start: those that say something about it.


def without_defaults(stock: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Wrap stock's `_print_args`, which prints 800 lines, nine in ten of them defaults."""

    def _print_args(title: str, args: Any) -> None:
        level = args.logging_level or int(os.environ.get("MEGATRON_LOGGING_LEVEL", logging.INFO))
        usual = defaults() if level >= logging.INFO else {}
        unusual = {
            name: value
            for name, value in vars(args).items()
            if name not in usual or as_json(value) != usual[name]
        }
        stock(title, Namespace(**unusual))
        if num_left := len(vars(args)) - len(unusual):
            say(f"{num_left} more arguments have their defaults; --logging-level 10 prints all")

    return _print_args
