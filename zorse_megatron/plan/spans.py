"""Half-open spans of integers: what they cover never or twice; and ranks in messages.

Work and memory grow with the number of spans, not with the size of the numbers, so that a plan
with an absurd layer count or rank is reported rather than enumerated.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from zorse_megatron.plan.plan import Plan

Span = tuple[int, int]


def gaps(spans: Iterable[Span], stop: int) -> list[Span]:
    """Return the parts of [0, stop) that no span covers.

    >>> gaps([(1, 3), (5, 6)], stop=8)
    [(0, 1), (3, 5), (6, 8)]
    """
    pieces = _pieces([*spans, (0, stop)])
    # The whole range is one of the spans, so a depth of 1 inside it is that span alone.
    return _joined([(a, b) for a, b, depth in pieces if depth == 1 and a >= 0 and b <= stop])


def overlaps(spans: Iterable[Span]) -> list[Span]:
    """Return the parts that two or more spans cover.

    >>> overlaps([(0, 3), (2, 5), (5, 6)])
    [(2, 3)]
    """
    return _joined([(a, b) for a, b, depth in _pieces(spans) if depth >= 2])


def spell(spans: Sequence[Span]) -> str:
    """Spell non-empty spans for people, both ends included.

    >>> spell([(0, 1), (3, 6)])
    '0, 3 to 5'
    """
    return ", ".join(str(a) if b - a == 1 else f"{a} to {b - 1}" for a, b in spans)


def spans_of(numbers: Iterable[int]) -> list[Span]:
    """Return the spans that cover exactly `numbers`.

    >>> spans_of([2, 0, 1, 7])
    [(0, 3), (7, 8)]
    """
    return _joined([(number, number + 1) for number in sorted(set(numbers))])


def _pieces(spans: Iterable[Span]) -> list[tuple[int, int, int]]:
    """Cut the line at every end of a span: (start, stop, number of spans that cover it)."""
    change: Counter[int] = Counter()
    for start, stop in spans:
        if start < stop:
            change[start] += 1
            change[stop] -= 1
    edges = sorted(change)
    depth = 0
    pieces = []
    for start, stop in pairwise(edges):
        depth += change[start]
        pieces.append((start, stop, depth))
    return pieces


def _joined(spans: list[Span]) -> list[Span]:
    """Merge neighbours that touch; the spans are sorted and do not overlap."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


# What a rank is called in messages.


def rank_name(plan: Plan, rank: int) -> str:
    """Name a rank by its number, its group and the layers that it trains."""
    number = plan.group_of_rank(rank)
    name = plan.groups[number].name
    layers = [plan.chunks[chunk].layers for chunk in plan.chunks_of_group(number)]
    label = "" if name is None else f" '{name}'"
    return f"rank {rank} (group {number}{label}, layers {spell(layers)})"
