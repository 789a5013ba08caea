"""What a schedule asks of each replica."""

from collections.abc import Mapping
from dataclasses import dataclass

Worker = tuple[int, int]
"""(group, replica)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a schedule asks of each replica."""

    limits: Mapping[Worker, int]
    """Most micro-batches in flight, counted once for each chunk."""
    fill_first: bool
    """Whether a replica below its limit prefers forwards to backwards."""
    samples_per_round: int
    """Samples that a replica takes through all of its chunks before those after them."""
    strict: bool = False
    """Whether a replica waits for what it prefers, although it could start something else."""
