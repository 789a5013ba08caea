"""Action lists for other counts, that fit where those of the plan file fit."""

from dataclasses import dataclass

from zorse_megatron.rebalance.balancer import Counts, with_counts
from zorse_megatron.rebalance.held import Held, held_by_ranks
from zorse_megatron.schedules.actions import ActionLists
from zorse_megatron.schedules.list_queries import edges_of
from zorse_megatron.schedules.lower import in_flight_limits, lower_plan
from zorse_megatron.schedules.policy import Worker
from zorse_megatron.schedules.samples import MicroBatch, replica_micro_batches
from zorse_megatron.schedules.validate import check_executable
from zorse_megatron.schema.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A plan with other counts, ready to run."""

    plan: Plan
    lists: ActionLists

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """Those of a rank."""
        return replica_micro_batches(self.plan, rank)


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
        """Return what runs with these counts, or why that cannot be.

        No replica has more in flight than the plan of the file lets it have. Raises ScheduleError
        where lists could not be executed, which is an error of the lowering.
        """
        plan = with_counts(self.plan, counts)
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
