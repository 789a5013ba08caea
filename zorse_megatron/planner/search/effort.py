"""Search budget, by cluster size."""

from dataclasses import dataclass, replace

from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.search.groupings import EVERY_PARTITION_UP_TO

LEVELS = (1, 2, 3, 4, 6, 8, 16)
"""Micro-batch levels that a group may be moved to."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much of everything the search does; it follows from the size of the cluster alone."""

    listed: int
    """Groupings that are scored."""
    costed: int
    """How many of those are costed with one schedule."""
    widened: int
    """Groupings whose neighbours are looked at, and that are costed with all schedules."""
    finalists: int
    """Plans that the simulator sees before the local search."""
    computations: int
    """Forwards and backwards that may be simulated in all."""
    finalists_part: float = 0.6
    """Share of these for finalists; the rest is for the local search."""
    quick_orders: int = 1
    """Orders of a grouping's groups that are looked at to see whether it is promising."""
    orders: int = 3
    """Orders of a grouping's groups that are costed."""
    levels: tuple[int, ...] = (1, 2, 4, 8)
    """Micro-batch levels that are costed."""
    partitions: int = 16
    """Partitions of device orders that are costed, for each schedule."""
    polished: int = 6
    """Estimates whose levels and order are improved by closed form."""
    slacks: tuple[float, ...] = (1.0,)
    """The values of 1f1b's slack that are costed."""
    level_steps: int = 1
    """By how many levels a group's micro-batch may change in one step of that."""
    keeps_all: bool = False
    """Whether all neighbours that are costed on the way may be simulated."""
    assignments: int = 2
    """Layer assignments that are kept of each candidate."""
    followed: int = 6
    """How many of the best evaluations the local search follows."""
    refits: int = 3
    """How often a neighbour that does not fit is built again with more memory left free."""
    tries: int = 10
    """Neighbours of an evaluation that are simulated, at most."""
    hopeless: float = 1.03
    """Finalists estimated at over this multiple of the best simulated time are not simulated."""
    tolerance: float = 1.1
    """Neighbours whose estimate is over this multiple are not simulated."""

    @property
    def light(self) -> "Effort":
        """A small part of it: enough to see whether another search is worth all of it."""
        return replace(
            self,
            listed=-(-self.listed // 4),
            costed=-(-self.costed // 6),
            widened=-(-self.widened // 6),
            finalists=-(-self.finalists // 6),
            finalists_part=1.0,
            computations=-(-self.computations // 40),
            partitions=-(-self.partitions // 4),
            polished=1,
            orders=1,
            levels=(1, 2, 4),
            refits=min(self.refits, 1),
            tries=3,
        )

    @classmethod
    def of(cls, inputs: Inputs) -> "Effort":
        """More where GPUs are few."""
        if inputs.world_size <= EVERY_PARTITION_UP_TO and len(inputs.space.schedules) == 1:
            return _EXHAUSTIVE
        return next((each for most, each in _UP_TO if inputs.world_size <= most), _BEYOND)


_EXHAUSTIVE = Effort(
    listed=250,
    costed=210,
    widened=210,
    finalists=120,
    computations=400_000,
    quick_orders=24,
    orders=24,
    levels=LEVELS,
    slacks=(0.0, 1.0),
    polished=60,
    level_steps=len(LEVELS),
    keeps_all=True,
    assignments=4,
    followed=12,
    tries=60,
    hopeless=1.2,
    tolerance=1.35,
)
_UP_TO = (  # GPUs
    (
        16,
        Effort(listed=250, costed=60, widened=16, finalists=40, computations=60_000, hopeless=1.15),
    ),
    (32, Effort(listed=250, costed=40, widened=14, finalists=30, computations=150_000)),
    (
        256,
        Effort(
            listed=250,
            costed=24,
            widened=8,
            finalists=24,
            computations=70_000,
            finalists_part=0.4,
            refits=0,
            polished=4,
        ),
    ),
    (
        2048,
        Effort(listed=200, costed=20, widened=5, finalists=4, computations=120_000, polished=2),
    ),
)
_BEYOND = Effort(listed=60, costed=8, widened=3, finalists=2, computations=400_000, polished=1)
