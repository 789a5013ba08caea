"""What the plugin tells the user: short lines, once, on rank 0."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far something that can be counted is: a search, or a measurement."""

    phase: str
    """For people: what is being done."""
    done: int
    """Steps of this phase that are done."""
    total: int | None
    """Steps of this phase in all, as far as is known; 0 or None: nobody knows."""


OnProgress = Callable[[Progress], None]


def is_first_rank() -> bool:
    """Whether this process is rank 0 of its job, or no distributed job at all."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str, *, on_each_node: bool = False, everywhere: bool = False) -> None:
    """Print one line on rank 0; `on_each_node`: on each node's first rank, as nodes may differ.

    `everywhere`: on this rank in any case.
    """
    on_this_node = on_each_node and os.environ.get("LOCAL_RANK") == "0"
    if everywhere or is_first_rank() or on_this_node:
        print(f"zorse: {line}", flush=True)


def complain(text: str, *, everywhere: bool = False) -> None:
    """Print an error on rank 0 and, as files may differ by node, on each node's first rank.

    `everywhere`: on this rank in any case.
    """
    if everywhere or is_first_rank() or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"zorse: error: {text}", file=sys.stderr, flush=True)
