"""Action lists for other counts of micro-batches, that fit where those of the plan file fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from zorse_megatron.live.rebalance import Counts, with_counts
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionLists,
    Kind,
    edges_of,
)
from zorse_megatron.schedule.lower import in_flight_limits, lower_plan
from zorse_megatron.schedule.pipeline_schedules import Worker
from zorse_megatron.schedule.samples import replica_micro_batches
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at
from zorse_megatron.schedule.validate import check_executable

# What the lists of a plan let its ranks hold at most, in samples: the measure of what fits.
#
# A plan's own lists have been shown to fit. Other counts fit if no rank holds more under them: of
# activations and of what weight gradients wait for no more, and of messages, which are small beside
# a layer's activations, at most one micro-batch more.


@dataclass(frozen=True, kw_only=True)
class Held:
    """The most of each that a rank holds at once."""

    activations: int
    """Samples times layers between their forward and their backward."""
    delayed: int
    """Samples times layers between a backward and its weight gradients."""
    messages: int
    """Samples that are arriving, or that have to leave."""

    def fits_in(self, other: "Held", *, micro_batch_size: int) -> bool:
        """Whether a rank that has room for `other` has room for this."""
        return (
            self.activations <= other.activations
            and self.delayed <= other.delayed
            and self.messages <= other.messages + micro_batch_size
        )


def held_by_ranks(plan: Plan, lists: ActionLists) -> tuple[Held, ...]:
    """Rank -> what its list of training lets it hold."""
    layers = [last - first for first, last in (chunk.layers for chunk in plan.chunks)]
    found = []
    for rank, actions in enumerate(lists.ranks):
        sizes = [each.size for each in replica_micro_batches(plan, rank)]
        found.append(held(actions, sizes, layers))
    return tuple(found)


def held(actions: Sequence[Action], sizes: Sequence[int], layers: Sequence[int]) -> Held:
    """What one list lets its rank hold.

    `sizes`: micro-batch -> its samples; `layers`: chunk -> how many it has.
    """
    splits = any(action.kind is Kind.WEIGHT_GRADIENT for action in actions)
    activations = _Level()
    delayed = _Level()
    for action in actions:
        if action.kind not in COMPUTE and action.kind is not Kind.WEIGHT_GRADIENT:
            continue
        assert action.chunk is not None and action.micro_batch is not None
        amount = layers[action.chunk] * sizes[action.micro_batch]
        if action.kind is Kind.FORWARD:
            activations.add(amount)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            delayed.add(-amount)
        else:
            activations.add(-amount)
            delayed.add(amount if splits else 0)
    return Held(
        activations=activations.highest, delayed=delayed.highest, messages=_messages(actions)
    )


def _messages(actions: Sequence[Action]) -> int:
    """Received ones count from their opening to the computation that takes them."""
    changes = [Fraction(0)] * (len(actions) + 1)
    takes = {
        (action.kind is Kind.FORWARD, action.chunk, action.micro_batch): position
        for position, action in enumerate(actions)
        if action.kind in COMPUTE
    }
    posted_at = receives_posted_at(actions)
    waited_at = sends_waited_at(actions)
    for position, action in enumerate(actions):
        if action.kind in RECEIVES:
            start = posted_at[position]
            forward = action.kind is Kind.RECV_F
            stop = takes[forward, action.chunk, action.micro_batch]
        elif action.kind in SENDS:
            start, stop = position, waited_at[position]
        else:
            continue
        assert action.samples is not None
        amount = Fraction(action.samples[1] - action.samples[0])
        if action.positions is not None:  # a part of each sequence
            amount *= Fraction(action.positions.stop - action.positions.start, action.positions.of)
        changes[start] += amount
        changes[stop] -= amount
    return math.ceil(max(accumulate(changes)))


class _Level:
    def __init__(self) -> None:
        self.now = self.highest = 0

    def add(self, change: int) -> None:
        self.now += change
        self.highest = max(self.highest, self.now)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan with other counts, ready to run."""

    plan: Plan
    lists: ActionLists


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Makes lists of other counts for one plan file."""

    plan: Plan
    """As in the file: what has been shown to fit."""
    tied: bool
    limits: dict[Worker, int]
    room: tuple[Held, ...]
    """Rank -> what it holds under the plan of the file."""
    links: frozenset[tuple[int, int]]
    """Pairs of ranks that can send."""

    @classmethod
    def of(
        cls, plan: Plan, lists: ActionLists, *, tied: bool, links: frozenset[tuple[int, int]]
    ) -> "Preparation":
        """`lists`: the plan's own, of training."""
        return cls(
            plan=plan,
            tied=tied,
            limits=dict(in_flight_limits(plan)),
            room=held_by_ranks(plan, lists),
            links=links,
        )

    def prepare(self, counts: Counts) -> Prepared | str:
        """Return what runs with these counts, or why that cannot be; see `prepare_plan`."""
        return self.prepare_plan(with_counts(self.plan, counts))

    def prepare_plan(self, plan: Plan) -> Prepared | str:
        """Return what runs under a plan of other micro-batches, or why that cannot be.

        No replica has more in flight than the plan of the file lets it have. Raises ScheduleError
        where lists could not be executed, which is an error of the lowering.
        """
        lists = lower_plan(plan, tied=self.tied, most_in_flight=self.limits)
        check_executable(
            lists, [replica.ranks for group in plan.groups for replica in group.replicas]
        )
        for rank, (now, room) in enumerate(zip(held_by_ranks(plan, lists), self.room, strict=True)):
            group, index = plan.replica_of_rank(rank)
            size = plan.groups[group].replicas[index].micro_batch_size
            if not now.fits_in(room, micro_batch_size=size):
                return f"rank {rank} would hold more: {now} instead of {room}"
        new = set(edges_of([lists])) - self.links
        if new:
            source, target = min(new)
            return f"rank {source} has no link to rank {target}"
        return Prepared(plan=plan, lists=lists)
