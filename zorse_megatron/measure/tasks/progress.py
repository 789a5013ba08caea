"""Progress of a measurement, for display."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A measurement that is about to start."""

    phase: str
    done: int
    total: int | None
    """None: nobody knows, as when sizes grow until memory ends."""


OnProgress = Callable[[Progress], None]
