"""Who owns which part of a flat buffer: contiguous shards in proportion to weights.

An interval is a pair (start, stop) of element positions, stop exclusive; start == stop is empty.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

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


def kept_pieces(pieces: int, fraction: float | None) -> int:
    """How many of a shard's first pieces stay on the device where a fraction is in the host.

    >>> kept_pieces(4, 0.6), kept_pieces(4, 0.5), kept_pieces(4, None)
    (1, 2, 0)
    """
    return 0 if fraction is None else pieces - math.ceil(pieces * fraction - 1e-9)


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


# Who sums and sends what where shards of one buffer are owned in several regions.
#
# A reduction has two levels. In each region, every element that the region owns is summed over its
# ranks by the owner, and every other one by a *delegate*: what another region owns (a *block*) is
# cut evenly into *slices*, one per rank. Then each delegate sends its sums to their owners, who add
# one of each region. So between two regions every element crosses once and no more, whatever the
# number of ranks, and all ranks of a region send equally much. A gather is the same backwards:
# owners send their shards to the delegates of the other regions, which spread them within theirs.
#
# Ranks are numbered within the group. Those of a region are neighbours, so a block is an interval.


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Elements [start, stop) of the buffer that a delegate and their owner exchange."""

    delegate: int
    owner: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class RegionShards:
    """A buffer, whose shards are owned in several regions."""

    bounds: tuple[Interval, ...]
    """What each rank owns; together the buffer."""
    regions: tuple[Interval, ...]
    """[first, stop) of the ranks of each region; together all ranks."""

    def __post_init__(self) -> None:
        ends = [0, *(stop for _, stop in self.regions)]
        starts = [*(first for first, _ in self.regions), len(self.bounds)]
        if ends != starts or any(first >= stop for first, stop in self.regions):
            raise ValueError(
                f"found regions {self.regions} of {len(self.bounds)} ranks; expected intervals of "
                "neighbouring ranks, none empty, that together are all of them"
            )

    def region_of(self, rank: int) -> int:
        """Number of the rank's region."""
        return next(n for n, (first, stop) in enumerate(self.regions) if first <= rank < stop)

    def block(self, region: int) -> Interval:
        """What the ranks of a region own."""
        first, stop = self.regions[region]
        return self.bounds[first][0], self.bounds[stop - 1][1]

    def slices(self, region: int, block: int) -> tuple[Interval, ...]:
        """What each rank of a region sums of the block of a region."""
        first, stop = self.regions[region]
        if region == block:
            return self.bounds[first:stop]
        start, end = self.block(block)
        even = shard_bounds(end - start, (1,) * (stop - first))
        return tuple((start + one, start + other) for one, other in even)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """All messages between regions, by delegate and then by element."""
        found = (
            crossing
            for region in range(len(self.regions))
            for block in range(len(self.regions))
            if region != block
            for crossing in self._between(region, block)
        )
        return tuple(sorted(found, key=lambda each: (each.delegate, each.start)))

    def _between(self, region: int, block: int) -> Iterator[Crossing]:
        """O(ranks of both): both sides cut the block in order."""
        owner, last = self.regions[block]
        for number, (start, stop) in enumerate(self.slices(region, block)):
            at = start
            while at < stop:
                while self.bounds[owner][1] <= at:
                    owner += 1
                assert owner < last
                end = min(stop, self.bounds[owner][1])
                yield Crossing(
                    delegate=self.regions[region][0] + number, owner=owner, start=at, stop=end
                )
                at = end

    def messages(self, *, to_owners: bool) -> dict[tuple[int, int], int]:
        """(source, target) -> elements of a message: sums to owners, or shards to delegates."""
        return {
            (each.delegate, each.owner) if to_owners else (each.owner, each.delegate): each.count
            for each in self.crossings
        }

    def sent_as_delegate(self, rank: int) -> tuple[int, ...]:
        """Elements of the sums that the rank makes for each rank."""
        return self._counts((e.owner, e.count) for e in self.crossings if e.delegate == rank)

    def sent_as_owner(self, rank: int) -> tuple[int, ...]:
        """Elements of the rank's shard that it sends to each rank: as many as come as sums."""
        return self._counts((e.delegate, e.count) for e in self.crossings if e.owner == rank)

    def _counts(self, pairs: Iterator[tuple[int, int]]) -> tuple[int, ...]:
        counts = [0] * len(self.bounds)
        for rank, count in pairs:
            counts[rank] += count
        return tuple(counts)

    def reduction_buffer(self, rank: int) -> int:
        """Elements that a rank holds beside the buffer in a reduction.

        Other regions' sums of its shard; and where there are several other regions its own sums of
        what these own, which are apart in the buffer and leave as one message.
        """
        others = len(self.regions) - 1
        start, stop = self.bounds[rank]
        return others * (stop - start) + self._packed(rank)

    def gather_buffer(self, rank: int) -> int:
        """The same in a gather, in which all stays in place between two regions."""
        others = len(self.regions) - 1
        start, stop = self.bounds[rank]
        return (others * (stop - start) if others > 1 else 0) + self._packed(rank)

    def _packed(self, rank: int) -> int:
        return sum(self.sent_as_delegate(rank)) if len(self.regions) > 2 else 0


def regions_of(runs: Sequence[Sequence[int]]) -> tuple[Interval, ...]:
    """[first, stop) of each region's ranks in a group, from the ranks region by region.

    >>> regions_of(((4, 5), (8, 9, 12)))
    ((0, 2), (2, 5))
    """
    found, first = [], 0
    for run in runs:
        found.append((first, first + len(run)))
        first += len(run)
    return tuple(found)
