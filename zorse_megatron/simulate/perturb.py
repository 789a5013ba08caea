"""Perturbations of the cost models: jitter, a mis-profiled rank or kind, a slow link."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SlowSpell:
    """Iterations in which a rank is slow. For emulated runs: a simulation is of one iteration."""

    rank: int
    """Global rank."""
    factor: float
    """Its computations take this many times as long."""
    first_iteration: int
    """Counted from 1."""
    last_iteration: int | None
    """None: it stays slow."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"found factor {self.factor}; expected it positive")

    def covers(self, rank: int, iteration: int) -> bool:
        """Whether the rank is slow in this iteration."""
        ends = math.inf if self.last_iteration is None else self.last_iteration
        return rank == self.rank and self.first_iteration <= iteration <= ends


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """How far the machines are from what the cost models say of them.

    `jitter`: standard deviation of each computation's duration over its mean. The factors are
    log-normal with mean 1, so that they are positive and add no time on average. They are drawn
    for each rank on its own, in the order of its list, so the same seed gives the same factors
    whatever the other ranks do.
    """

    jitter: float = 0.0
    seed: int = 0
    rank_factors: Mapping[int, float] = field(default_factory=dict)
    """Global rank -> its computations take this many times as long."""
    kind_factors: Mapping[str, float] = field(default_factory=dict)
    """GPU kind -> the same for all of its ranks."""
    link_factors: Mapping[str, float] = field(default_factory=dict)
    """Name of a shared link -> its bandwidth is this many times what it was."""
    spells: tuple[SlowSpell, ...] = ()
    """Beside the rest."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(f"found jitter {self.jitter}; expected a number of 0 or more")
        for name in ("rank_factors", "kind_factors", "link_factors"):
            for key, factor in getattr(self, name).items():
                if not (math.isfinite(factor) and factor > 0):
                    raise ValueError(f"found {name}[{key!r}] = {factor}; expected it positive")

    def rank_factor(self, rank: int, kind: str) -> float:
        """How many times as long each computation of the rank takes, jitter left out."""
        return self.rank_factors.get(rank, 1.0) * self.kind_factors.get(kind, 1.0)

    def factor_in(self, iteration: int, rank: int, kind: str) -> float:
        """The same in one iteration of an emulated run, counted from 1."""
        slow = (spell.factor for spell in self.spells if spell.covers(rank, iteration))
        return self.rank_factor(rank, kind) * math.prod(slow)

    def jitter_of(self, rank: int) -> "JitterSource":
        """The factors of one rank's computations, in the order of its list."""
        return JitterSource(self, rank)

    def pace_of(self, rank: int, kind: str) -> "Pace":
        """Both, of the rank's computations in the order of its list."""
        return Pace(self.rank_factor(rank, kind), self.jitter_of(rank))

    @property
    def treats_kinds_alike(self) -> bool:
        """Whether ranks of one kind stay equal."""
        return not (self.jitter or self.rank_factors or self.link_factors or self.spells)


class JitterSource:
    """Draws one factor after the other."""

    def __init__(self, perturbation: Perturbation, rank: int) -> None:
        variance = math.log1p(perturbation.jitter**2)  # of the logarithm
        self._mean, self._deviation = -variance / 2, math.sqrt(variance)
        self._random = random.Random(f"{perturbation.seed}/{rank}") if self._deviation else None

    def draw(self) -> float:
        """The next factor; 1 without jitter."""
        if self._random is None:
            return 1.0
        return self._random.lognormvariate(self._mean, self._deviation)


class Pace:
    """How many times as long each computation of one rank takes."""

    def __init__(self, factor: float, jitter: JitterSource) -> None:
        self._factor, self._jitter = factor, jitter

    def draw(self) -> float:
        """Of the next one."""
        return self._factor * self._jitter.draw()


NO_PERTURBATION = Perturbation()
