"""What a run's ranks and links take, beside what the plan says: for a file and the log."""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from zorse_megatron.inputs.status import Change, LinkStatus, Move, RankStatus, Shares, Status
from zorse_megatron.live.rebalance import MOST_STEPS, Counts, Speed, counts_of
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import fingerprint

# How long messages take between two ranks, without knowing how far their clocks are apart.
#
# A message is seen where it is handed over, by its sender's clock, and where it arrives, by its
# receiver's, if that was waiting for it. The difference has the clocks' in it; in that of a message
# the other way it has the other sign. So half the sum of both is the mean of the two ways, if they
# are of the same iteration: clocks that drift apart by a millionth are 10 us off after 10 s.


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


# What a rank's iteration took, as ranks tell each other.


@dataclass(frozen=True, kw_only=True)
class IterationTimes:
    """Seconds of one rank's iteration."""

    number: int
    """Of the iteration in this run, from 0."""
    micro_batch_s: float
    """One micro-batch through all chunks: the median of each chunk's forwards and of its backwards,
    added up, without what they wait for. 0 where there are none."""
    compute_s: float
    """All forwards and backwards, without what they wait for."""
    waited_s: float
    """For messages of other ranks."""
    update_s: float
    """Reductions, the optimizer step and gathers, as far as the main stream waits for them."""
    iteration_s: float
    """From the list's first action to its last."""


_SHARES = ("compute", "waited", "update")
# A rank that takes longer than this is called slow, beyond three standard errors, and no longer if
# it takes less than the second.
_SLOW, _NO_LONGER_SLOW = 1.10, 1.05
_SURE = 3.0


@dataclass(kw_only=True)
class RunStatus:
    """The last iterations of all ranks."""

    plan: Plan
    """As in the file."""
    tokens_per_iteration: int
    first_iteration: int
    """Iterations of earlier runs, which a checkpoint has brought."""
    counts: Counts = ()
    """In force."""
    changes: list[Change] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    ended: bool = False
    links: LinkTimes | None = None
    speeds: dict[int, Speed] = field(default_factory=dict)
    _recent: deque[tuple[IterationTimes, ...]] = field(
        default_factory=lambda: deque(maxlen=MOST_STEPS)
    )
    _last: int = 0
    """Number of the last iteration that was taken."""
    _slow: set[int] = field(default_factory=set)
    _first_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.counts = self.counts or counts_of(self.plan)

    def take(self, ranks: Sequence[IterationTimes]) -> None:
        """One iteration's times of all ranks; the run's first one is not like the others."""
        if ranks[0].number == 0:
            return
        self._recent.append(tuple(ranks))
        self._last = ranks[0].number
        for rank, each in enumerate(ranks):
            if each.micro_batch_s:
                speed = self.speeds.setdefault(rank, Speed(since=each.number))
                speed.add(each.number, each.micro_batch_s, self._count(rank))
                if speed.is_known:
                    self._first_s.setdefault(rank, speed.seconds)

    def change(self, number: int, counts: Counts) -> None:
        """Other counts are in force from an iteration on."""
        self.counts = counts
        self._recent.clear()
        self.changes.append(Change(iteration=self._iteration(number), counts=counts))

    def slowdown(self, rank: int) -> float | None:
        """How many times as long as planned it takes, or as at first; None: not known yet."""
        speed = self.speeds.get(rank)
        if speed is None or not speed.is_known:
            return None
        return speed.seconds / (self._planned_s(rank) or self._first_s[rank])

    def news(self) -> Iterator[str]:
        """Lines on ranks that have become slow since the last call, or no longer are."""
        for rank, speed in sorted(self.speeds.items()):
            slowdown = self.slowdown(rank)
            if slowdown is None:
                continue
            what = "planned" if self._planned_s(rank) else "at first"
            if rank not in self._slow and slowdown > _SLOW + _SURE * speed.noise * slowdown:
                self._slow.add(rank)
                since = self._iteration(speed.since)
                yield (
                    f"{self._named(rank)} takes {slowdown:.2f} times as long as {what} "
                    f"for a micro-batch, since iteration {since}"
                )
            elif rank in self._slow and slowdown < _NO_LONGER_SLOW:
                self._slow.discard(rank)
                yield f"{self._named(rank)} is as fast as {what} again"

    def scalars(self) -> Mapping[str, float]:
        """A few numbers of the last iteration, for charts."""
        if not self._recent:
            return {}
        last = self._recent[-1]
        found = {
            "zorse/waited-share": statistics.fmean(
                each.waited_s / each.iteration_s for each in last if each.iteration_s
            ),
            "zorse/list-s": max(each.iteration_s for each in last),
        }
        slowdowns = [each for rank in self.speeds if (each := self.slowdown(rank)) is not None]
        if slowdowns:
            found["zorse/worst-slowdown"] = max(slowdowns)
        return found

    def now(self, *, written_s: float) -> Status:
        """What the file has."""
        predictions = self.plan.predictions
        iteration_s = _median([max(e.iteration_s for e in each) for each in self._recent]) or None
        return Status(
            schema_version=1,
            plan=fingerprint(self.plan),
            iteration=self._iteration(self._last),
            written_s=written_s,
            iteration_s=iteration_s,
            tokens_per_s=self.tokens_per_iteration / iteration_s if iteration_s else None,
            planned_iteration_s=None if predictions is None else predictions.iteration_s,
            changes=tuple(self.changes),
            moves=tuple(self.moves),
            ended=self.ended,
            ranks=tuple(self._rank(rank) for rank in range(self.plan.world_size)),
            links=() if self.links is None else self.links.links(),
        )

    def _rank(self, rank: int) -> RankStatus:
        group, index = self.plan.replica_of_rank(rank)
        replica, speed = self.plan.groups[group].replicas[index], self.speeds.get(rank)
        known = speed if speed is not None and speed.is_known else None
        return RankStatus(
            rank=rank,
            kind=self._kind(rank),
            group=group,
            replica=index,
            micro_batch_size=replica.micro_batch_size,
            num_microbatches=self.counts[group][index],
            micro_batch_s=None if known is None else known.seconds,
            planned_micro_batch_s=self._planned_s(rank),
            slowdown=self.slowdown(rank),
            noise=None if known is None else known.noise,
            since=None if known is None else self._iteration(known.since),
            shares=Shares(**{name: self._share(rank, name) for name in _SHARES}),
        )

    def _share(self, rank: int, name: str) -> float | None:
        times = [each[rank] for each in self._recent if each[rank].iteration_s]
        return _median([getattr(each, f"{name}_s") / each.iteration_s for each in times])

    def _count(self, rank: int) -> int:
        group, index = self.plan.replica_of_rank(rank)
        return max(1, self.counts[group][index])

    def _planned_s(self, rank: int) -> float | None:
        predictions = self.plan.predictions
        if predictions is None or predictions.micro_batch_s is None:
            return None
        return predictions.micro_batch_s[rank] or None

    def _kind(self, rank: int) -> str | None:
        kinds = self.plan.cluster.gpu_kinds if self.plan.cluster else None
        return None if kinds is None else kinds[rank]

    def _named(self, rank: int) -> str:
        kind = self._kind(rank)
        return f"rank {rank}" if kind is None else f"rank {rank} ({kind})"

    def _iteration(self, number: int) -> int:
        """As Megatron counts it."""
        return self.first_iteration + number + 1


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
