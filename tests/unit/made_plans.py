"""Plans in few words: groups of replicas, and one chunk for each unless others are asked for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule


def replica(
    *ranks: int, size: int = 1, count: int = 1, weight: float = 1.0, **more: Any
) -> Replica:
    """`count` micro-batches of `size` samples."""
    return Replica(
        ranks=ranks, micro_batch_size=size, num_microbatches=count, shard_weight=weight, **more
    )


def plan_of(
    *groups: Group | Sequence[Replica],
    layers: int | None = None,
    owners: Sequence[int] | None = None,
    schedule: str = "1f1b",
    parameters: dict[str, str] | None = None,
    model: dict[str, Any] | None = None,
    **fields: Any,
) -> Plan:
    """The layers, one for each group if not said, in equal chunks; with `owners` of one layer each.

    The batch is that of the first group.
    """
    made = tuple(each if isinstance(each, Group) else Group(replicas=(*each,)) for each in groups)
    held_by = range(len(made)) if owners is None else owners
    num_layers = len(held_by) if layers is None else layers
    bounds = [num_layers * at // len(held_by) for at in range(len(held_by) + 1)]
    return Plan(
        schema_version=2,
        global_batch_size=sum(each.num_samples for each in made[0].replicas),
        model=ModelFingerprint(num_layers=num_layers, **model or {}),
        groups=made,
        chunks=tuple(
            Chunk(group=group, layers=(bounds[at], bounds[at + 1]))
            for at, group in enumerate(held_by)
        ),
        schedule=Schedule(name=schedule, parameters=parameters or {}),
        **fields,
    )


def even_plan(stages: int, replicas: int, count: int, size: int = 1) -> Plan:
    """A stock layout: PP=stages, DP=replicas."""
    return plan_of(
        *(
            [replica(stage * replicas + r, size=size, count=count) for r in range(replicas)]
            for stage in range(stages)
        )
    )


def one_group(
    *replicas: tuple[int, int],
    weights: Sequence[float] | None = None,
    layers: int = 1,
    **options: Any,
) -> Plan:
    """One group of (micro-batch size, count) replicas."""
    made = tuple(
        replica(rank, size=size, count=count, weight=weight)
        for rank, ((size, count), weight) in enumerate(
            zip(replicas, weights or [1.0] * len(replicas), strict=True)
        )
    )
    return plan_of(Group(replicas=made, **options), layers=layers)


def with_groups(plan: Plan, **options: Any) -> Plan:
    """The plan with these fields in all groups."""
    return replace(plan, groups=tuple(replace(group, **options) for group in plan.groups))


def dealt_out(
    plan: Plan, num_chunks: int, *, schedule: str = "breadth_first", **parameters: str
) -> Plan:
    """The plan with chunks of one layer, dealt out to its groups in turn: `num_chunks` to each."""
    owners = list(range(len(plan.groups))) * num_chunks
    return with_owners(plan, owners, schedule, **parameters)


def with_owners(
    plan: Plan, owners: Sequence[int], schedule: str = "breadth_first", **parameters: str
) -> Plan:
    """The plan with chunks of one layer, held by these groups."""
    return plan_of(*plan.groups, owners=owners, schedule=schedule, parameters=parameters)


def ministages(stages: int, replicas: int, count: int, num_chunks: int, **parameters: str) -> Plan:
    """Equal groups with chunks dealt out in turn, breadth first."""
    return dealt_out(even_plan(stages, replicas, count), num_chunks, **parameters)


def in_tp_groups(plan: Plan, size: int) -> Plan:
    """The same plan with `size` ranks in the place of each."""

    def widened(one: Replica) -> Replica:
        return replace(one, ranks=tuple(range(size * one.ranks[0], size * (one.ranks[0] + 1))))

    groups = (replace(each, replicas=tuple(map(widened, each.replicas))) for each in plan.groups)
    return replace(plan, groups=tuple(groups))
