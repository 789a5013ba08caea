"""Which arguments a run prints at its start: those that say something about it."""

import logging
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.arguments.stock_parser import as_json
from zorse_megatron.flags.table import defaults
from zorse_megatron.log import say


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
