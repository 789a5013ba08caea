"""Is another plan worth the move?"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """The present plan and another one, at the speeds that the run's GPUs have."""

    present_s: float
    """Simulated iteration under the present plan, with its present counts."""
    next_s: float
    """Simulated iteration under the other plan."""
    move_s: float
    """What the run stands still for to get there."""
    iterations: int
    """Over which that has to pay."""

    @property
    def gain(self) -> float:
        """Part of the present plan's time that is saved, with the move spread over iterations."""
        if self.iterations < 1:
            return -1.0
        return 1 - (self.next_s + self.move_s / self.iterations) / self.present_s
