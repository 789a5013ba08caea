"""Load of one link in a ring gather or scatter, over equal or unequal shards.

A gather is one broadcast per owner, passed on from rank to rank, all at once: NCCL's all-gather
over equal shards, its grouped broadcasts over unequal ones. The link into a rank carries every
shard but that rank's own, so the busiest link carries all but the smallest: S - s_min bytes,
S * (N - 1) / N where all are equal. A reduce-scatter is a gather backwards: each link carries the
same, so one formula serves both (the additions hide behind the transfers). Shards padded to the
largest would carry s_max * (N - 1), which is never less, and need room in GPUs that are full.
"""

from dataclasses import dataclass

UNEVEN_PENALTY = 1.25
"""Factor on the time of collectives over unequal shards where it was not measured.

Cephalo (ICS 2025, section 4: "x 1.25 on collectives when uneven") measured NCCL's to take a quarter
longer than over equal shards of the same total. `zorse discover` measures it on a cluster.
"""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What matters of a list of shard sizes."""

    count: int
    total_bytes: float
    smallest_bytes: float
    is_even: bool

    @classmethod
    def of(cls, sizes: tuple[float, ...]) -> "Shards":
        """Summarise. O(shards)."""
        smallest = min(sizes)
        return cls(
            count=len(sizes),
            total_bytes=sum(sizes),
            smallest_bytes=smallest,
            is_even=max(sizes) == smallest,
        )

    @property
    def mean_bytes(self) -> float:
        """Size of a message when the buffer is sent shard by shard."""
        return self.total_bytes / self.count

    @property
    def ring_bytes(self) -> float:
        """What the busiest link of a ring carries.

        >>> Shards.of((60.0, 20.0, 20.0)).ring_bytes
        80.0
        """
        return self.total_bytes - self.smallest_bytes
