"""What selections of GPUs take and cost, and which of them are worth choosing."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.planner.selection.fewer import Selection

Aim = Literal["fastest", "cheapest"]
AIMS: tuple[Aim, ...] = ("fastest", "cheapest")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A selection, and the best plan that was found for it."""

    ranks: Selection
    iteration_s: float
    """Infinite where nothing fits."""
    tokens: int
    """Of an iteration."""
    price_per_hour: float | None = None
    """Of all its GPUs; None: the cluster file gives no prices."""

    @property
    def tokens_per_s(self) -> float:
        """Zero where nothing fits."""
        return self.tokens / self.iteration_s

    @property
    def price_per_gtoken(self) -> float | None:
        """Price of 10^9 tokens; None: no prices."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour / 3600 * self.iteration_s / self.tokens * 1e9

    @property
    def fits(self) -> bool:
        """Whether any plan does."""
        return self.iteration_s < math.inf


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the best selection is."""

    aim: Aim = "fastest"
    most_per_gtoken: float | None = None
    """The most that 10^9 tokens may cost; None: any price."""

    def rank(self, point: Point) -> tuple[float, float, float, int]:
        """Least is best; first of all, to be within the budget.

        Of those that are as good by the aim, the better one by the other measure, then fewer GPUs.
        """
        price = point.price_per_gtoken or 0.0
        over = 0.0 if self.most_per_gtoken is None else max(0.0, price - self.most_per_gtoken)
        first, second = (
            (point.iteration_s, price) if self.aim == "fastest" else (price, point.iteration_s)
        )
        return over, first, second, len(point.ranks)

    def allows(self, point: Point) -> bool:
        """Whether it fits and is within the budget."""
        return point.fits and self.rank(point)[0] == 0.0


def is_beaten(point: Point, others: Iterable[Point]) -> bool:
    """Whether one of the others is as fast and as cheap, and better in one of the two."""
    mine = point.iteration_s, point.price_per_gtoken or 0.0
    for other in others:
        its = other.iteration_s, other.price_per_gtoken or 0.0
        if its[0] <= mine[0] and its[1] <= mine[1] and its != mine:
            return True
    return False


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other one beats, fastest first; one of those that are equal."""
    fitting = [point for point in points if point.fits]
    found: dict[tuple[float, float], Point] = {}
    for point in sorted(fitting, key=lambda each: (len(each.ranks), each.ranks)):
        if not is_beaten(point, fitting):
            found.setdefault((point.iteration_s, point.price_per_gtoken or 0.0), point)
    return sorted(found.values(), key=lambda each: each.iteration_s)
