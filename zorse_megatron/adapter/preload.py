"""What a process does before it forks ranks, so that no rank has to; lines that a run says once."""

import argparse
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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


def hooks_of_forked_ranks(*, on_gpu: bool) -> Replacements:
    """What this process has built is at hand in its ranks, and without CUDA they fork helpers."""
    helpers = {} if on_gpu else {"save_queue": _forked}
    return {"add_arguments": _from_parent, **helpers}


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


# Lines that a run says once: Megatron says them on each rank, or for each chunk of a rank.


# Not the handlers, as Megatron's own passes over their filters.
_OF_CHUNKS = (
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.param_and_grad_buffer",
)


@contextmanager
def warned_once_per_node() -> Iterator[None]:
    """While Megatron is imported: ranks of a node have the same packages, and the first one tells
    which are missing.
    """
    shown = warnings.showwarning

    def unshown(*_args: Any, **_kwargs: Any) -> None:
        """Another rank shows it."""

    if os.environ.get("LOCAL_RANK", "0") != "0":
        warnings.showwarning = unshown
    try:
        yield
    finally:
        if warnings.showwarning is unshown:  # it may have been replaced by what is imported
            warnings.showwarning = shown


@contextmanager
def logged_once() -> Iterator[None]:
    """What is logged when a chunk is built, or its buckets, is logged once for chunks alike."""
    seen: set[tuple[str, int, str]] = set()

    def is_new(record: logging.LogRecord) -> bool:
        line = record.name, record.levelno, record.getMessage()
        is_first = line not in seen
        seen.add(line)
        return is_first

    loggers = [logging.getLogger(name) for name in _OF_CHUNKS]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)
