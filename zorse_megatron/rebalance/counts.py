"""Counts of micro-batches with which the slowest replica of a group is done soonest.

Sizes stay as they are: how long a micro-batch of another size takes has not been measured, and what
it would keep has not been shown to fit. So does the sum of samples, exactly.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReplicaTime:
    """What one replica runs, and for how long."""

    micro_batch_size: int
    num_microbatches: int
    """Now; at least 1."""
    seconds: float
    """Of one micro-batch through all chunks of the replica, forward and backward."""

    @property
    def busy_s(self) -> float:
        """Of an iteration."""
        return self.num_microbatches * self.seconds


def best_counts(replicas: Sequence[ReplicaTime]) -> tuple[int, ...]:
    """Return the counts with the least time of the slowest replica, each at least 1.

    Of several such counts, those closest to each replica's part of the group's rate. Complexity:
    O(replicas x log(batch)) operations on integers of as many bits as the batch has samples, for
    each of O(log) limits.
    """
    batch = sum(each.micro_batch_size * each.num_microbatches for each in replicas)
    rate = sum(each.micro_batch_size / each.seconds for each in replicas)
    low, high = batch / rate * (1 - 1e-12), max(each.busy_s for each in replicas)
    limits = sorted(
        {high}
        | {
            count * each.seconds
            for each in replicas
            for count in range(max(1, int(low / each.seconds)), int(high / each.seconds) + 1)
            if low <= count * each.seconds <= high
        }
    )
    index = bisect_left(
        limits, True, key=lambda limit: bool(_reached(replicas, limit)[-1] >> batch & 1)
    )
    return _chosen(replicas, limits[index], batch)


def _most(each: ReplicaTime, limit_s: float) -> int:
    """Micro-batches within the limit."""
    return int(limit_s / each.seconds * (1 + 1e-12))


def _reached(replicas: Sequence[ReplicaTime], limit_s: float) -> list[int]:
    """Bit s of entry n: the first n replicas can run s samples in time, each at least one batch."""
    reached = [1]
    for each in replicas:
        reached.append(_added(reached[-1], each.micro_batch_size, _most(each, limit_s)))
    return reached


def _added(bits: int, size: int, most: int) -> int:
    """Bits s + n * size, for every bit s and every n from 1 to `most`."""
    if not most:
        return 0
    bits <<= size
    done = 1
    while done < most:
        step = min(done, most - done)
        bits |= bits << (step * size)
        done += step
    return bits


def _chosen(replicas: Sequence[ReplicaTime], limit_s: float, batch: int) -> tuple[int, ...]:
    reached = _reached(replicas, limit_s)
    counts: list[int] = []
    left = batch
    for number in range(len(replicas) - 1, -1, -1):
        each = replicas[number]
        rest = sum(other.micro_batch_size / other.seconds for other in replicas[: number + 1])
        wanted = left / rest / each.seconds
        possible = (
            count
            for count in range(1, min(_most(each, limit_s), left // each.micro_batch_size) + 1)
            if reached[number] >> (left - count * each.micro_batch_size) & 1
        )
        count = min(possible, key=lambda count: (abs(count - wanted), count))
        counts.append(count)
        left -= count * each.micro_batch_size
    return tuple(reversed(counts))
