"""What a move was to bring, and what it has brought."""

from dataclasses import dataclass

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

    def is_broken(self, measured_s: float) -> bool:
        """Whether the plan before was faster."""
        return measured_s > _WORSE * self.left_s

    def told(self, measured_s: float) -> str:
        """In words."""
        return (
            f"under plan {self.plan} an iteration takes {measured_s:.4g} s "
            f"({self.simulated_s:.4g} s were simulated), and took {self.left_s:.4g} s before"
        )
