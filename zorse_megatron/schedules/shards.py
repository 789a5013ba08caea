"""Who owns which part of a flat buffer: contiguous shards in proportion to weights.

An interval is a pair (start, stop) of element positions, stop exclusive; start == stop is empty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Interval = tuple[int, int]

STATE_PIECE_ELEMENTS = 2**24
"""Elements of a shard whose optimizer state passes through the device at once in a STEP, where it
waits in the host: two such pieces of 16 bits training's state are 0.4 GB."""


def shard_bounds(total: int, weights: Sequence[float], *, align: int = 64) -> tuple[Interval, ...]:
    """Split `total` elements into one contiguous interval per member, in proportion to `weights`.

    The intervals come in member order and cover [0, total) without gaps. A member with weight 0
    gets an empty interval. When the positive weights are equal and their number divides `total`,
    every such member gets exactly the same size, which is the split of the stock
    DistributedOptimizer. Otherwise the sizes are whole units of `align` elements, dealt out by
    largest remainder (ties to the earlier member), so a size is off its exact share by at most
    2 * align, and only the last non-empty interval may end off a multiple of `align`; with fewer
    units than members some get nothing. The arithmetic is exact, so all ranks agree.

    >>> shard_bounds(1024, (3, 1, 0))
    ((0, 768), (768, 1024), (1024, 1024))

    Raises ValueError for a negative `total`, no weights, or weights that are negative, not finite
    or all zero.
    """
    _check(total, weights, align)
    owners = sum(weight > 0 for weight in weights)
    if len({weight for weight in weights if weight > 0}) == 1 and total % owners == 0:
        sizes = [total // owners if weight > 0 else 0 for weight in weights]
    else:
        sizes = [align * units for units in _largest_remainder(math.ceil(total / align), weights)]
    bounds, start = [], 0
    for size in sizes:
        stop = min(start + size, total)  # the last unit may be cut short
        bounds.append((start, stop))
        start = stop
    return tuple(bounds)


def state_pieces(owned: int) -> tuple[int, ...]:
    """Sizes of the pieces in which a shard of `owned` elements is stepped; at least one.

    >>> state_pieces(2**24 + 1), state_pieces(0)
    ((16777216, 1), (0,))
    """
    whole, rest = divmod(owned, STATE_PIECE_ELEMENTS)
    return (STATE_PIECE_ELEMENTS,) * whole + ((rest,) if rest or not whole else ())


def passing_at_most(owned: int) -> int:
    """Elements of a shard of `owned` elements that pass through the device at once: two pieces."""
    return min(owned, 2 * STATE_PIECE_ELEMENTS)


def largest_piece(owned: int) -> int:
    """Elements of the largest of the pieces."""
    return min(owned, STATE_PIECE_ELEMENTS)


def _check(total: int, weights: Sequence[float], align: int) -> None:
    if total < 0 or align < 1:
        raise ValueError(f"found total {total} and align {align}; expected total >= 0, align >= 1")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(
            f"found shard weights {tuple(weights)}; expected finite numbers >= 0, at least one > 0"
        )


def _largest_remainder(units: int, weights: Sequence[float]) -> list[int]:
    """Deal `units` out to members: floors of the exact quotas, then one each by remainder."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [weight * units / sum(exact) for weight in exact]
    dealt = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (dealt[i] - quotas[i], i))
    for member in by_remainder[: units - sum(dealt)]:
        dealt[member] += 1
    return dealt


def intersection(first: Interval, second: Interval) -> Interval | None:
    """The elements in both intervals, or None when there are none.

    >>> intersection((0, 10), (8, 12))
    (8, 10)
    """
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Elements [start, stop) of one tensor that a member of each of two partitions owns."""

    first_member: int
    second_member: int
    start: int
    stop: int


def overlaps(first: Sequence[Interval], second: Sequence[Interval]) -> tuple[Overlap, ...]:
    """Every overlap between two partitions of one tensor, in the order of their elements.

    `first` and `second` hold one interval per member. Both sides compute the same list, so its
    order can serve as the common order of messages.
    """
    found = [
        Overlap(first_member=i, second_member=j, start=both[0], stop=both[1])
        for i, mine in enumerate(first)
        for j, theirs in enumerate(second)
        if (both := intersection(mine, theirs)) is not None
    ]
    return tuple(sorted(found, key=lambda overlap: overlap.start))
