"""Lines that a run says once: Megatron says them on each rank, or for each chunk of a rank."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    is_new = _new_lines()
    loggers = [logging.getLogger(name) for name in _OF_CHUNKS]
    for logger in loggers:
        logger.addFilter(is_new)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_new)


def _new_lines() -> Callable[[logging.LogRecord], bool]:
    seen: set[tuple[str, int, str]] = set()

    def is_new(record: logging.LogRecord) -> bool:
        line = record.name, record.levelno, record.getMessage()
        is_first = line not in seen
        seen.add(line)
        return is_first

    return is_new
