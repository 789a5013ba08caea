"""Time of an exchange in which every rank sends each owner its part of a buffer directly.

Unlike around a ring, what the ranks behind a slow link have to say crosses it rank by rank: of a
buffer of S bytes over n ranks, k of which are behind the link and own O bytes, k (S - O) bytes
leave and (n - k) O arrive. A ring carries about S each way, whatever k is. So narrow messages pay
where few ranks are on each side, and lose where many share a NIC.
"""

from collections import Counter
from collections.abc import Hashable, Sequence


def largest_load(sides: Sequence[Hashable], shard_bytes: Sequence[float]) -> float:
    """Most bytes that enter or leave a side. O(ranks).

    `sides`: for each rank, what it is in (a node, a region; itself).

    >>> largest_load(["a", "a", "b"], [30.0, 10.0, 20.0])
    40.0
    >>> largest_load([0, 1, 2], [30.0, 10.0, 20.0])
    60.0
    """
    counts = Counter(sides)
    owned: Counter[Hashable] = Counter()
    for side, size in zip(sides, shard_bytes, strict=True):
        owned[side] += size  # type: ignore[assignment]  # bytes may be fractions
    total, ranks = sum(shard_bytes), len(sides)
    loads = (
        max(count * (total - owned[side]), (ranks - count) * owned[side])
        for side, count in counts.items()
    )
    return max(loads, default=0.0)
