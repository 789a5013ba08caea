"""How long a replica takes for a micro-batch now, how sure that is, and since when."""

import math
import statistics
from dataclasses import dataclass, field

# What a computation's duration varies by, unless more is seen: a GPU's clock, other jobs on its
# host. It stands in for what a few measurements cannot tell.
USUAL_JITTER = 0.1
# Steps that an estimate rests on at most, and those in a row that tell a change from noise.
MOST_STEPS = 16
FEWEST_STEPS = 3
# A smaller change is none.
_LEAST_CHANGE = 0.05


@dataclass(kw_only=True)
class Speed:
    """The last measurements of one replica, as long as they are of one level."""

    values: list[tuple[int, float, int]] = field(default_factory=list)
    """(step, median seconds of a micro-batch, micro-batches of it)."""
    since: int = 0
    """Step with which the present level began."""

    def add(self, step: int, seconds: float, num_microbatches: int) -> None:
        """Take one step's measurement; forget what came before a change."""
        self.values.append((step, seconds, num_microbatches))
        if self._has_changed():
            self.values = self.values[-FEWEST_STEPS:]
            self.since = self.values[0][0]
        self.values = self.values[-MOST_STEPS:]

    @property
    def is_known(self) -> bool:
        """Whether there are enough measurements."""
        return len(self.values) >= FEWEST_STEPS

    @property
    def seconds(self) -> float:
        """Of one micro-batch."""
        return statistics.fmean(seconds for _, seconds, _ in self.values)

    @property
    def noise(self) -> float:
        """Standard error of `seconds`, as a part of it."""
        seen = [seconds for _, seconds, _ in self.values]
        count = sum(number for _, _, number in self.values)
        return max(USUAL_JITTER / math.sqrt(count), _spread(seen) / math.sqrt(len(seen)))

    def _has_changed(self) -> bool:
        before, recent = self.values[:-FEWEST_STEPS], self.values[-FEWEST_STEPS:]
        if not before or len(recent) < FEWEST_STEPS:
            return False
        seen = [seconds for _, seconds, _ in before]
        mean = statistics.fmean(seen)
        single = max(USUAL_JITTER / math.sqrt(recent[-1][2]), _spread(seen))
        bound = max(_LEAST_CHANGE, 2 * single)
        if len(before) < FEWEST_STEPS:  # less sure; but what is forgotten is little
            bound *= 2
        off = [seconds / mean - 1 for _, seconds, _ in recent]
        return min(off) > bound or max(off) < -bound


def _spread(seconds: list[float]) -> float:
    """Standard deviation as a part of the mean."""
    mean = statistics.fmean(seconds)
    return statistics.stdev(seconds) / mean if len(seconds) > 1 and mean else 0.0
