"""Exact min-max split of a batch over unequal replicas: sizes and counts.

Each replica runs n micro-batches of m samples, n * m samples in all; 0 is allowed. The slowest
replica's n * t(m) is minimised exactly, with the sums n * m adding up to the batch exactly.

Replicas are given as classes of equal ones. For a time limit, the sample counts that one replica
can reach are the bits of an integer; those of several replicas are its sumset, found by doubling.
The least limit whose sumset contains the batch is found by bisection over the times n * t(m).
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReplicaClass:
    """Replicas that are equal."""

    count: int
    times_s: Mapping[int, float]
    """Micro-batch size -> seconds, forward and backward; only sizes that are allowed."""


@dataclass(frozen=True, kw_only=True)
class ReplicaShare:
    """What one replica runs."""

    micro_batch_size: int
    num_microbatches: int

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return self.micro_batch_size * self.num_microbatches


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """What every replica runs, by class."""

    time_s: float
    """Time of the slowest replica."""
    shares: tuple[tuple[ReplicaShare, ...], ...]
    """Class -> its replicas, those with most samples first."""


def best_split(batch: int, classes: Sequence[ReplicaClass]) -> BatchSplit | None:
    """Return the split with the least time; None where no replica may run anything.

    Of several ways to run as many samples in time, a replica takes the smallest micro-batches.
    O(classes * log(replicas) * sizes * batch) word operations for each of O(log) limits.
    """
    if not any(each.count and each.times_s for each in classes):
        return None
    limits = _limits(batch, classes)
    index = bisect_left(limits, True, key=lambda limit: _reaches(batch, classes, limit))
    if index == len(limits):
        return None
    return _reconstructed(batch, classes, limits[index])


def rate_bound_s(batch: int, classes: Sequence[ReplicaClass]) -> float:
    """Return the time that the batch takes if it can be cut at will: a lower bound of any split."""
    rate = sum(
        each.count * max((size / time_s for size, time_s in each.times_s.items()), default=0.0)
        for each in classes
    )
    return batch / rate if rate else math.inf


def _limits(batch: int, classes: Sequence[ReplicaClass]) -> list[float]:
    """All times that the slowest replica of the best split can take, ascending.

    It takes no longer than with one micro-batch more on everyone than the lower bound has, if the
    sum can then be reached; where it cannot, the window is doubled.
    """
    low = rate_bound_s(batch, classes) * (1 - 1e-12)
    slowest = max(time_s for each in classes for time_s in each.times_s.values())
    width = slowest
    while not _reaches(batch, classes, low + width) and width < 4 * batch * slowest:
        width *= 2
    high = low + width
    found = {
        count * time_s
        for each in classes
        for size, time_s in each.times_s.items()
        for count in range(
            max(1, math.floor(low / time_s)), min(batch // size, math.floor(high / time_s) + 1) + 1
        )
    }
    return sorted(limit for limit in found if low <= limit <= high * (1 + 1e-12))


def _reaches(batch: int, classes: Sequence[ReplicaClass], limit_s: float) -> bool:
    reached = 1
    for each in classes:
        reached = _sumset(reached, _power(_reachable(batch, each, limit_s), each.count, batch))
        reached &= (1 << (batch + 1)) - 1
    return bool(reached >> batch & 1)


def _options(batch: int, each: ReplicaClass, limit_s: float) -> Iterator[tuple[int, int, float]]:
    """(size, most micro-batches, time of one) of a replica within the limit."""
    for size, time_s in sorted(each.times_s.items()):
        most = min(batch // size, math.floor(limit_s / time_s * (1 + 1e-12)))
        if most > 0:
            yield size, most, time_s


def _reachable(batch: int, each: ReplicaClass, limit_s: float) -> int:
    """Bit s is set where one replica can run s samples in time."""
    bits = 1
    for size, most, _ in _options(batch, each, limit_s):
        for count in range(1, most + 1):
            bits |= 1 << (size * count)
    return bits


def _sumset(first: int, second: int) -> int:
    """Bit s + t is set for every bit s of one and bit t of the other."""
    if first.bit_count() < second.bit_count():
        first, second = second, first
    result = at = 0
    while second:  # one run of set bits after the other
        zeros = (second & -second).bit_length() - 1
        second >>= zeros
        ones = (~second & (second + 1)).bit_length() - 1
        second >>= ones
        result |= _smeared(first, ones) << (at + zeros)
        at += zeros + ones
    return result


def _smeared(bits: int, length: int) -> int:
    """The sumset with the numbers below `length`."""
    done = 1
    while done < length:
        step = min(done, length - done)
        bits |= bits << step
        done += step
    return bits


def _power(bits: int, count: int, batch: int) -> int:
    """The sumset of `count` equal sets, up to the batch."""
    mask = (1 << (batch + 1)) - 1
    result, square = 1, bits
    while count:
        if count & 1:
            result = _sumset(result, square) & mask
        count >>= 1
        if count:
            square = _sumset(square, square) & mask
    return result


def _reconstructed(batch: int, classes: Sequence[ReplicaClass], limit_s: float) -> BatchSplit:
    sets = [_reachable(batch, each, limit_s) for each in classes]
    powers = [_power(bits, each.count, batch) for bits, each in zip(sets, classes, strict=True)]
    after = [1]  # sums of all classes from here on
    mask = (1 << (batch + 1)) - 1
    for power in reversed(powers):
        after.append(_sumset(after[-1], power) & mask)
    after.reverse()
    shares, left = [], batch
    # A class gets the part of what is left that is closest to its part of the rate.
    rates = [each.count / min_time_per_sample(each) for each in classes]
    for number, each in enumerate(classes):
        wanted = left * rates[number] / (sum(rates[number:]) or 1.0)
        samples = _closest(powers[number], after[number + 1], left, wanted)
        left -= samples
        counts = _dealt(sets[number], each.count, samples, batch)
        shares.append(
            tuple(
                _share(batch, each, limit_s, samples_of_one)
                for samples_of_one in sorted(counts, reverse=True)
            )
        )
    time_s = max(
        share.num_microbatches * each.times_s.get(share.micro_batch_size, 0.0)
        for each, row in zip(classes, shares, strict=True)
        for share in row
    )
    return BatchSplit(time_s=time_s, shares=tuple(shares))


def min_time_per_sample(each: ReplicaClass) -> float:
    """Seconds per sample at the best size; infinite where nothing is allowed."""
    return min((t / size for size, t in each.times_s.items()), default=math.inf)


def _closest(here: int, rest: int, total: int, wanted: float) -> int:
    """The s closest to `wanted` with s in `here` and total - s in `rest`."""
    for distance in range(total + 1):
        for s in (math.floor(wanted) - distance, math.floor(wanted) + 1 + distance):
            if 0 <= s <= total and here >> s & 1 and rest >> (total - s) & 1:
                return s
    raise AssertionError("the sumset contained the total")


def _dealt(bits: int, count: int, samples: int, batch: int) -> list[int]:
    """Sample counts of `count` replicas that add up to `samples`, as even as halving makes them."""
    if count == 0:
        return []
    if count == 1:
        return [samples]
    half = count // 2
    # Equal counts are the common case, and need no sumsets.
    even, rest = divmod(samples, count)
    if not rest and bits >> even & 1:
        return [even] * count
    first, second = _power(bits, half, batch), _power(bits, count - half, batch)
    part = _closest(first, second, samples, samples * half / count)
    return _dealt(bits, half, part, batch) + _dealt(bits, count - half, samples - part, batch)


def _share(batch: int, each: ReplicaClass, limit_s: float, samples: int) -> ReplicaShare:
    if samples == 0:
        return ReplicaShare(micro_batch_size=1, num_microbatches=0)
    size = next(
        size
        for size, most, _ in _options(batch, each, limit_s)
        if samples % size == 0 and samples // size <= most
    )
    return ReplicaShare(micro_batch_size=size, num_microbatches=samples // size)
