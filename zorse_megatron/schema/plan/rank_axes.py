"""The ranks that communicate along each axis of parallelism, of a plan's unequal groups."""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

from zorse_megatron.schema.plan.plan import Group, Plan


def set_of_rank(plan: Plan, rank: int) -> tuple[int, ...]:
    """The tensor-parallel set of `rank`: the ranks of its replica, in order of their parts."""
    group, replica = plan.replica_of_rank(rank)
    return plan.groups[group].replicas[replica].ranks


def holds_equal_parts(group: Group) -> bool:
    """Whether all replicas cut layers into the same parts, so that each rank has twins."""
    return len({(len(replica.ranks), replica.unequal_parts) for replica in group.replicas}) == 1


def data_parallel_ranks(group: Group) -> tuple[tuple[int, ...], ...]:
    """Ranks among which gradients are summed and shards are cut, in ascending order each.

    Where replicas hold equal parts: those with the same part, one of each replica. Otherwise all
    ranks of the group.
    """
    if not holds_equal_parts(group):
        return (tuple(sorted(group.ranks)),)
    parts = zip(*(replica.ranks for replica in group.replicas), strict=True)
    return tuple(tuple(sorted(part)) for part in parts)


def ranks_by_region(group: Group, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks of the group, in their order, cut where the region changes."""
    regions = {rank: replica.region for replica in group.replicas for rank in replica.ranks}
    return tuple(tuple(run) for _, run in groupby(ranks, key=regions.__getitem__))


def communicating_ranks(
    group: Group,
) -> tuple[tuple[Literal["group", "region", "across"], tuple[int, ...]], ...]:
    """What each communicator for sums and gathers of the group is for, and its ranks.

    group: over all of `data_parallel_ranks`; of a hierarchical group also one in each region, and
    one across them for messages.
    """
    found: list[tuple[Literal["group", "region", "across"], tuple[int, ...]]] = []
    for ranks in data_parallel_ranks(group):
        found.append(("group", ranks))
        if group.hierarchical:
            found += [("region", run) for run in ranks_by_region(group, ranks)]
            found.append(("across", ranks))
    return tuple(found)
