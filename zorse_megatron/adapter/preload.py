"""What a process does before it forks ranks, so that no rank has to."""

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.patches import emulation
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.flags.check import check_command
from zorse_megatron.flags.command import read_command, unknown_problems

# Argument -> the variable that its default is of, and what it is without that one.
_OF_LAUNCHER = {"local_rank": ("LOCAL_RANK", 0), "inprocess_active_world_size": ("WORLD_SIZE", 1)}


def import_late_modules_of_stock() -> None:
    """Import what stock imports late in every run; starts no thread and no process group."""
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text.models.default_tokenizer
    import megatron.training.yaml_arguments  # noqa: F401


def remember_flags() -> None:
    """Build what reads the flags of a command, once; `hooks_of_forked_ranks` are applied before."""
    from megatron.training import arguments

    check_command(read_command([]), None)
    stock = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    unknown_problems([], [word for action in stock._actions for word in action.option_strings])


def hooks_of_forked_ranks() -> Replacements:
    """What this process has built is at hand in its ranks, and they fork their helpers."""
    return {
        emulation.ADD_ARGUMENTS: _from_parent,
        emulation.SAVE_QUEUE: _forked,
    }


def _from_parent(stock: Callable[..., Any]) -> Callable[..., Any]:
    """As argparse's `parents` do: what differs by rank aside, no one changes its arguments."""
    parent = stock(argparse.ArgumentParser(add_help=False, allow_abbrev=False))

    @functools.wraps(stock)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser._add_container_actions(parent)
        parser.set_defaults(
            **{
                name: int(os.environ.get(variable, otherwise))
                for name, (variable, otherwise) in _OF_LAUNCHER.items()
            }
        )
        return parser

    return add_megatron_arguments


def _forked(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_write_results_queue(mp_mode: str = "fork") -> Any:
        return stock(mp_mode)

    return get_write_results_queue
