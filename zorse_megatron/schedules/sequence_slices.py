"""How an activation is cut between tensor-parallel sets: along the sequence, a slice per rank.

Rank i of a set of d has or sends the i-th of d equal slices of a micro-batch's positions, with
sequence parallelism and without. Between two sets the messages are the overlaps of their slices, so
each element crosses once, whatever the two degrees. Without sequence parallelism every rank of the
receiving set needs the whole: the set gathers it inside itself.

Slices are fractions of the sequence, as lists of actions do not depend on its length.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import lcm


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSlice:
    """Positions from start / of to stop / of of a sequence."""

    start: int
    stop: int
    of: int

    def bounds(self, length: int) -> tuple[int, int]:
        """The half-open interval of positions in a sequence of `length` tokens.

        >>> SequenceSlice(start=1, stop=2, of=3).bounds(8)
        (2, 5)
        """
        return length * self.start // self.of, length * self.stop // self.of

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}/{self.of}"


def slice_of_rank(index: int, degree: int) -> SequenceSlice:
    """What the rank at `index` of a set of `degree` ranks has or sends."""
    return SequenceSlice(start=index, stop=index + 1, of=degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePair:
    """What one rank of a set sends to one rank of another set."""

    source: int
    """Index in the sending set."""
    target: int
    positions: SequenceSlice | None
    """None: the whole sequence."""


@cache
def slice_pairs(sources: int, targets: int) -> tuple[SlicePair, ...]:
    """The messages between sets of `sources` and `targets` ranks, in the order of positions.

    >>> [(p.source, p.target, str(p.positions)) for p in slice_pairs(2, 3)]
    [(0, 0, '0:1/3'), (0, 1, '2:3/6'), (1, 1, '3:4/6'), (1, 2, '2:3/3')]
    """
    if sources == targets == 1:
        return (SlicePair(source=0, target=0, positions=None),)
    unit = lcm(sources, targets)
    edges = sorted({*range(0, unit + 1, unit // sources), *range(0, unit + 1, unit // targets)})
    return tuple(
        SlicePair(
            source=start * sources // unit,
            target=start * targets // unit,
            positions=_reduced(start, stop, unit),
        )
        for start, stop in pairwise(edges)
    )


def _reduced(start: int, stop: int, unit: int) -> SequenceSlice:
    of = lcm(Fraction(start, unit).denominator, Fraction(stop, unit).denominator)
    return SequenceSlice(start=start * of // unit, stop=stop * of // unit, of=of)
