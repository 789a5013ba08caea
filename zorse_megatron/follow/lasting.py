"""Whether what GPUs take has changed for good, since it was last decided what to do about it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zorse_megatron.costs.own_speeds import GpuSpeed
from zorse_megatron.follow.observed import Observed

# A smaller change of a GPU's speed could bring no other plan enough.
_LEAST_CHANGE = 0.05
# Standard errors that noise is taken to feign at most.
_SURE = 3.0
# Iterations after which other counts have shown what they bring.
_COUNTS_TAKE = 4


@dataclass(kw_only=True)
class Lasting:
    """Remembers the speeds that were last decided on, and when the run last moved.

    A speed has to have lasted `patience` iterations, twice as many after each move of the last
    `memory` iterations: a GPU that is slow now and then makes the run move a few times, not each
    time.
    """

    patience: int
    memory: int
    known: tuple[GpuSpeed | None, ...] = ()
    """Rank -> what was last decided on; empty: what the profile says."""
    moves: list[int] = field(default_factory=list)
    """Iterations of moves."""
    not_before: int = 0
    _as_known: dict[int, int] = field(default_factory=dict)
    """Rank -> the last iteration that was looked at in which it did not differ."""

    def changed(self, seen: Observed) -> tuple[int, ...]:
        """Ranks whose speed is another one for good; empty as long as any may still be passing."""
        ranks = self.differing(seen)
        for rank, speed in enumerate(seen.speeds):
            if speed is not None and rank not in ranks:
                self._as_known[rank] = seen.iteration
        wanted = self.needed(seen.iteration)
        may_pass = any(seen.iteration - self._since(rank, seen) < wanted for rank in ranks)
        settling = seen.counts_since and seen.iteration - seen.counts_since < _COUNTS_TAKE
        if may_pass or settling or seen.iteration < self.not_before:
            return ()
        return ranks

    def differing(self, seen: Observed) -> tuple[int, ...]:
        """Ranks whose speed is another one now, for good or not."""
        known = self.known or (GpuSpeed(factor=1.0, noise=0.0),) * len(seen.speeds)
        return tuple(
            rank
            for rank, (now, before) in enumerate(zip(seen.speeds, known, strict=True))
            if _differ(now, before)
        )

    def needed(self, iteration: int) -> int:
        """How many iterations a speed has to have lasted by now."""
        return self.patience * 2 ** self._recent_moves(iteration)

    def decided(self, speeds: Sequence[GpuSpeed | None]) -> None:
        """It has been decided what to do at these speeds."""
        self.known = tuple(speeds)

    def moved(self, iteration: int) -> None:
        """The run has gone on under another plan."""
        self.moves.append(iteration)

    def refused(self, iteration: int, times: int) -> None:
        """The run has refused to; the more often in a row, the longer nothing is asked."""
        self.not_before = iteration + self.patience * 2 ** min(times, 10)

    def restarted(self, iteration: int) -> None:
        """The run has gone back to an earlier iteration."""
        self.not_before, self._as_known = 0, {}
        self.moves = [min(each, iteration) for each in self.moves]

    def _since(self, rank: int, seen: Observed) -> int:
        """Since when it has differed: a mean over two speeds seems to last, but comes and goes."""
        began = seen.since[rank]
        return max(seen.iteration if began is None else began, self._as_known.get(rank, 0))

    def _recent_moves(self, iteration: int) -> int:
        return min(10, sum(iteration - each < self.memory for each in self.moves))


def _differ(now: GpuSpeed | None, before: GpuSpeed | None) -> bool:
    if now is None or before is None:  # a rank that computes nothing under one of two plans
        return False
    noise = _SURE * math.hypot(now.noise, before.noise)
    return abs(math.log(now.factor / before.factor)) > math.log1p(_LEAST_CHANGE + noise)
