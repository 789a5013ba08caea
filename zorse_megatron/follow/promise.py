"""What a move was to bring, and what it has brought."""

from collections.abc import Iterable
from dataclasses import dataclass

from zorse_megatron.follow.observed import Observed
from zorse_megatron.rebalance.speeds import FEWEST_STEPS, MOST_STEPS
from zorse_megatron.schema.status.status import Status

# A plan that is slower by less than that is not: medians of a few iterations differ by as much.
_WORSE = 1.02


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Of a move."""

    plan: str
    """To which the run has moved."""
    left: str
    """The plan before."""
    left_s: float
    """Iteration under it, as measured before the move."""
    simulated_s: float
    """Iteration under the new plan."""
    iteration: int
    """With which it began."""

    def can_be_told(self, seen: Observed, differing: Iterable[int], patience: int) -> bool:
        """Whether what iterations take now says something about the plan, and nothing else.

        `differing`: ranks with other speeds than those that the plan is for. One that has become
        so since the move is no fault of the plan; from the move on it may be.
        """
        settled = self.iteration + FEWEST_STEPS
        later = {rank: s for rank, s in enumerate(seen.since) if s is not None and s > settled}
        if not later.keys().isdisjoint(differing):
            return False
        wanted = max(patience, MOST_STEPS // 2 + 1)
        return seen.iteration - max(self.iteration, *later.values(), 0) >= wanted

    def is_broken(self, measured_s: float) -> bool:
        """Whether the plan before was faster."""
        return measured_s > _WORSE * self.left_s

    def told(self, measured_s: float) -> str:
        """In words."""
        return (
            f"under plan {self.plan} an iteration takes {measured_s:.4g} s "
            f"({self.simulated_s:.4g} s were simulated), and took {self.left_s:.4g} s before"
        )


def measured_before(status: Status, seen: Observed, changed: Iterable[int]) -> float | None:
    """What an iteration takes at the speeds that are left; None: most that were seen had others."""
    window = min(MOST_STEPS, seen.iteration - seen.counts_since)
    began = max((seen.since[rank] or 0 for rank in changed), default=0)
    return status.iteration_s if 2 * (seen.iteration - began + 1) > window else None
