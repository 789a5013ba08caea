"""Load of one link in a ring gather or scatter, and in which form.

A reduce-scatter is an all-gather backwards: each link carries the same, so one formula serves both
(the additions hide behind the transfers). The forms are those that collective libraries have for
shards of different sizes:

- `equal`: all shards are of one size. N - 1 steps of one shard each.
- `padded`: smaller shards are padded to the largest, then as `equal`: s_max * (N - 1) bytes.
- `grouped`: one broadcast (or reduce) per owner, all in one launch: S bytes, the whole buffer.

`grouped` carries less than `padded` once the largest share exceeds 1 / (N - 1).
"""

from dataclasses import dataclass
from typing import Literal

Form = Literal["equal", "padded", "grouped"]

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
    largest_bytes: float
    is_even: bool

    @classmethod
    def of(cls, sizes: tuple[float, ...]) -> "Shards":
        """Summarise. O(shards)."""
        largest = max(sizes)
        return cls(
            count=len(sizes),
            total_bytes=sum(sizes),
            largest_bytes=largest,
            is_even=min(sizes) == largest,
        )

    @property
    def mean_bytes(self) -> float:
        """Size of a message when the buffer is sent shard by shard."""
        return self.total_bytes / self.count


@dataclass(frozen=True, kw_only=True)
class RingTraffic:
    """What every link of a ring carries: this many bytes, in messages of this size."""

    form: Form
    bytes_per_link: float
    message_bytes: float


def ring_traffic(shards: Shards) -> tuple[RingTraffic, ...]:
    """The forms that are possible for these shards. O(1).

    >>> sizes = Shards.of((60.0, 20.0, 20.0))
    >>> [(way.form, way.bytes_per_link) for way in ring_traffic(sizes)]
    [('padded', 120.0), ('grouped', 100.0)]
    """
    padded_bytes = shards.largest_bytes * (shards.count - 1)
    largest = shards.largest_bytes
    if shards.is_even:
        return (RingTraffic(form="equal", bytes_per_link=padded_bytes, message_bytes=largest),)
    return (
        RingTraffic(form="padded", bytes_per_link=padded_bytes, message_bytes=largest),
        RingTraffic(
            form="grouped", bytes_per_link=shards.total_bytes, message_bytes=shards.mean_bytes
        ),
    )
