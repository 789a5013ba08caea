"""How long messages take between two ranks, without knowing how far their clocks are apart.

A message is seen where it is handed over, by its sender's clock, and where it arrives, by its
receiver's, if that was waiting for it. The difference has the clocks' in it; in that of a message
the other way it has the other sign. So half the sum of both is the mean of the two ways, if they
are of the same iteration: clocks that drift apart by a millionth are 10 us off after 10 s.
"""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from zorse_megatron.schema.status.status import LinkStatus

_KEPT, _FEWEST = 32, 3
_UNKNOWN = math.nan

Edge = tuple[int, int]
"""Source and target rank."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """One rank's messages in an iteration."""

    number: int
    """Of the iteration in this run."""
    sent: Mapping[int, Sequence[tuple[int, int, float]]]
    """Target -> tag, bytes, and when it was handed over."""
    arrived: Mapping[int, Sequence[tuple[int, float | None]]]
    """Source -> tag, and when it arrived; None: nobody was waiting for it."""


@dataclass(kw_only=True)
class LinkTimes:
    """What all ranks tell of one message of each link and iteration, and what comes of it."""

    edges: Sequence[Edge]
    """In one order on all ranks."""
    world_size: int
    _kept: dict[tuple[Edge, int], deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_KEPT))
    )
    """(lower and higher rank, bytes) -> seconds one way."""

    @property
    def width(self) -> int:
        """Numbers in a rank's row."""
        ends = Counter[int]()
        for source, target in self.edges:
            ends[source] += 2
            ends[target] += 1
        return max(ends.values(), default=0)

    def row(self, rank: int, messages: Messages | None) -> list[float]:
        """What a rank tells: of each link from it when and how much, of each link to it when."""
        found: list[float] = []
        if messages is None:
            return [_UNKNOWN] * self.width
        for source, target in self.edges:
            if source == rank:
                sent = _chosen(messages.number, messages.sent.get(target, ()))
                found += (_UNKNOWN, _UNKNOWN) if sent is None else (sent[2], float(sent[1]))
            elif target == rank:
                arrived = _chosen(messages.number, messages.arrived.get(source, ()))
                when = None if arrived is None else arrived[1]
                found.append(_UNKNOWN if when is None else when)
        return found + [_UNKNOWN] * (self.width - len(found))

    def take(self, rows: Sequence[Sequence[float]]) -> None:
        """What all ranks have told of one iteration."""
        one_way: dict[Edge, tuple[float, int]] = {}
        at = [0] * self.world_size
        for source, target in self.edges:
            when_sent, num_bytes = rows[source][at[source] : at[source] + 2]
            when_arrived = rows[target][at[target]]
            at[source] += 2
            at[target] += 1
            if not math.isnan(when_sent + when_arrived):
                one_way[source, target] = when_arrived - when_sent, int(num_bytes)
        for (source, target), (there_s, num_bytes) in one_way.items():
            back = one_way.get((target, source))
            if source < target and back is not None and back[1] == num_bytes:
                both_s = there_s + back[0]
                if both_s > 0:  # else a clock has been set
                    self._kept[(source, target), num_bytes].append(both_s / 2)

    def links(self) -> tuple[LinkStatus, ...]:
        """What is known of each link."""
        return tuple(
            LinkStatus(
                ranks=pair,
                num_bytes=num_bytes,
                seconds=statistics.median(seconds),
                messages=len(seconds),
            )
            for (pair, num_bytes), seconds in sorted(self._kept.items())
            if len(seconds) >= _FEWEST
        )


_Message = TypeVar("_Message", tuple[int, int, float], tuple[int, float | None])


def _chosen(number: int, messages: Sequence[_Message]) -> _Message | None:
    """One that both ends choose: every other time the first, for which receivers wait."""
    if not messages:
        return None
    ordered = sorted(messages, key=lambda each: each[0])
    return ordered[0 if number % 2 else number // 2 % len(ordered)]
