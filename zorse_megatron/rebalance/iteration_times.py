"""What a rank's iteration took, as ranks tell each other."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """Seconds of one rank's iteration."""

    number: int
    """Of the iteration in this run, from 0."""
    micro_batch_s: float
    """One micro-batch through all chunks: the median of each chunk's forwards and of its backwards,
    added up, without what they wait for. 0 where there are none."""
    compute_s: float
    """All forwards and backwards, without what they wait for."""
    waited_s: float
    """For messages of other ranks."""
    update_s: float
    """Reductions, the optimizer step and gathers, as far as the main stream waits for them."""
    iteration_s: float
    """From the list's first action to its last."""
