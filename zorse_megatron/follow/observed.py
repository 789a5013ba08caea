"""What a run is seen to be, from its status: its plan with its counts, and each GPU's speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.costs.own_speeds import GpuSpeed
from zorse_megatron.rebalance.balancer import with_counts
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.status.status import Status


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A run after an iteration."""

    iteration: int
    plan: Plan
    """With the counts of micro-batches that are in force."""
    speeds: tuple[GpuSpeed | None, ...]
    """Rank -> beside the profile; None: not known, such as of a rank that computes nothing."""
    since: tuple[int | None, ...]
    """Rank -> iteration with which its present speed began."""
    counts_since: int
    """Iteration with which the present counts began; 0: with the plan."""


def observed(status: Status, plan: Plan, modelled_s: Sequence[float]) -> Observed:
    """Compare a run's status with what the profile says.

    `plan`: the file that it runs under. `modelled_s`: rank -> seconds of one of its micro-batches.
    """
    rows: list[list[int]] = [[0] * len(group.replicas) for group in plan.groups]
    for each in status.ranks:
        rows[each.group][each.replica] = each.num_microbatches
    counts = tuple(map(tuple, rows))
    present = tuple(
        tuple(replica.num_microbatches for replica in group.replicas) for group in plan.groups
    )
    return Observed(
        iteration=status.iteration,
        plan=plan if counts == present else with_counts(plan, counts),
        speeds=tuple(
            GpuSpeed(factor=each.micro_batch_s / modelled, noise=each.noise or 0.0)
            if each.micro_batch_s and modelled
            else None
            for each, modelled in zip(status.ranks, modelled_s, strict=True)
        ),
        since=tuple(each.since for each in status.ranks),
        counts_since=status.changes[-1].iteration if status.changes else 0,
    )
