"""The ranks that communicate along each axis of parallelism, of a plan's unequal groups."""

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
