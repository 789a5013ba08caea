"""Plans for the tests that train: groups, chunks, sets, and what may be said of each."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.plan import (
    Chunk,
    ExpertParallel,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
    TpShards,
)


def tp_replica(
    ranks: tuple[int, ...],
    size: int,
    count: int,
    weight: float = 1.0,
    tp_shards: TpShards | None = None,
) -> Replica:
    """A replica of several ranks."""
    return Replica(
        ranks=ranks,
        micro_batch_size=size,
        num_microbatches=count,
        shard_weight=weight,
        tp_shards=tp_shards,
    )


def expert_replica(
    ranks: tuple[int, ...],
    experts: tuple[int, ...],
    samples: tuple[int, ...],
    count: int,
    *weights: float,
    weight: float = 1.0,
    overlap: bool = False,
) -> Replica:
    """A replica whose ranks share experts alone."""
    return Replica(
        ranks=ranks,
        micro_batch_size=sum(samples),
        num_microbatches=count,
        shard_weight=weight,
        expert_parallel=ExpertParallel(
            experts=experts, samples=samples, shard_weights=weights or None, overlap=overlap
        ),
    )


def replica(rank: int, size: int, count: int, weight: float = 1.0) -> Replica:
    return Replica(
        ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=weight
    )


def plan_of(*groups: tuple[tuple[Replica, ...], int]) -> Plan:
    """A plan of (replicas, number of layers) in model order."""
    chunks, first = [], 0
    for number, (_, layers) in enumerate(groups):
        chunks.append(Chunk(group=number, layers=(first, first + layers)))
        first += layers
    return Plan(
        schema_version=2,
        global_batch_size=groups[0][0][0].num_samples
        + sum(r.num_samples for r in groups[0][0][1:]),
        model=ModelFingerprint(num_layers=first),
        groups=tuple(Group(replicas=replicas) for replicas, _ in groups),
        chunks=tuple(chunks),
        schedule=Schedule(name="1f1b"),
    )


def computing_in(plan: Plan, *dtypes: ComputeDtype | None) -> Plan:
    """The plan, with a type for each group to compute in."""
    groups = [
        dataclasses.replace(group, compute_dtype=dtype)
        for group, dtype in zip(plan.groups, dtypes, strict=True)
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def chunked_plan(groups: Sequence[tuple[Replica, ...]], chunks: Sequence[tuple[int, int]]) -> Plan:
    """A breadth-first plan of chunks (group, number of layers) in model order."""
    plan = plan_of(*((replicas, 1) for replicas in groups))
    listed, first = [], 0
    for group, layers in chunks:
        listed.append(Chunk(group=group, layers=(first, first + layers)))
        first += layers
    return dataclasses.replace(
        plan,
        model=ModelFingerprint(num_layers=first),
        chunks=tuple(listed),
        schedule=Schedule(name="breadth_first"),
    )


# Group sizes in model order; every layout has unequal micro-batches and shards where it can.
LAYOUTS = {
    "2|1": plan_of(((replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0)), 1), ((replica(2, 4, 2),), 3)),
    "1|2": plan_of(((replica(1, 2, 4),), 3), ((replica(2, 3, 2, 0.2), replica(0, 2, 1, 0.8)), 1)),
    "3|2": plan_of(
        ((replica(0, 1, 3, 0.0), replica(4, 2, 2, 1.0), replica(2, 1, 1, 2.5)), 2),
        ((replica(1, 1, 5, 1.0), replica(3, 3, 1, 1.0)), 2),
    ),
    "2|1|2": plan_of(
        ((replica(0, 2, 3, 3.0), replica(1, 1, 2, 1.0)), 1),
        ((replica(2, 4, 2),), 2),
        ((replica(3, 1, 5, 1.0), replica(4, 3, 1, 0.3)), 1),
    ),
    "1|1|1|1": plan_of(
        ((replica(3, 1, 8),), 1), ((replica(1, 8, 1),), 1),
        ((replica(2, 2, 4),), 1), ((replica(0, 4, 2),), 1),
    ),
    "4": plan_of(
        (
            (replica(0, 1, 1, 1.0), replica(1, 3, 1, 0.0), replica(2, 1, 2, 4.0), replica(3, 2, 1)),
            4,
        ),
    ),
    "5, one idle": plan_of(
        (
            (
                replica(0, 1, 2, 1.0),
                replica(1, 2, 1, 2.0),
                replica(2, 1, 0, 5.0),
                replica(3, 3, 1, 1.0),
                replica(4, 1, 1, 0.5),
            ),
            4,
        ),
    ),
    # Neither rank 0 nor the last rank is where stock expects it: on an end of the pipeline.
    "1|3|1, ends inside": plan_of(
        ((replica(2, 4, 2),), 1),
        ((replica(0, 1, 4, 3.0), replica(4, 2, 1, 1.1), replica(1, 2, 1, 0.7)), 2),
        ((replica(3, 8, 1),), 1),
    ),
    "2|3, idle at the end": plan_of(
        ((replica(0, 2, 2), replica(1, 4, 1)), 2),
        ((replica(2, 4, 2, 0.5), replica(3, 1, 0, 2.0), replica(4, 1, 0, 0.0)), 2),
    ),
}  # fmt: skip


PAIR = (replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0))
ALONE = (replica(2, 4, 2),)


def breadth_first(**parameters: Any) -> Schedule:
    return Schedule(name="breadth_first", parameters=parameters)


def with_settings(
    plan: Plan, *recompute: Recompute | None, schedule: Schedule | None = None, **offload: bool
) -> Plan:
    """`recompute`: one for all groups, or one for each; `offload`: what all groups offload."""
    each = recompute * len(plan.groups) if len(recompute) == 1 else recompute
    groups = [
        dataclasses.replace(
            group,
            recompute=each[number] if each else None,
            offload=Offload(**offload) if offload else None,
        )
        for number, group in enumerate(plan.groups)
    ]
    schedule = schedule or plan.schedule
    return dataclasses.replace(plan, groups=tuple(groups), schedule=schedule)


TWO_BY_TWO = chunked_plan([PAIR, ALONE], [(0, 1), (1, 1), (0, 1), (1, 1)])
LAYERED = chunked_plan(
    [(replica(0, 1, 5, 2.0), replica(1, 1, 0, 1.0), replica(2, 3, 1, 0.0))], [(0, 1)] * 4
)
# Group 0 has both ends of the model; a replica computes nothing, another one owns nothing.
BOTH_ENDS = chunked_plan(
    [
        (replica(0, 1, 3, 3.0), replica(3, 1, 5, 0.0)),
        (replica(2, 4, 2), replica(1, 1, 0, 2.0)),
    ],
    [(0, 1), (1, 2), (0, 1)],
)
# Chunks of a group that follow one another, and groups with different numbers of chunks.
NEIGHBOURS = chunked_plan(
    [(replica(2, 2, 4),), (replica(0, 1, 4), replica(1, 4, 1, 2.5))],
    [(0, 1), (0, 1), (1, 1), (0, 1)],
)
FULL, SELECTIVE, NONE = (Recompute(mode=mode) for mode in ("full", "selective", "none"))
FIRST_LAYER = Recompute(mode="full", num_layers=1)


def each_its_own(plan: Plan, *, parameters: bool = False) -> Plan:
    """The plan; its replicas in turn offload all that they may, nothing, and a part of it."""
    own: tuple[dict[str, Any], ...] = (
        {
            "recompute": FULL,
            "offload": Offload(
                parameters=parameters,
                gradients=parameters,
                optimizer_state=True,
                activations=True,
            ),
        },
        {},
        {"recompute": FIRST_LAYER, "offload": Offload(parameters=parameters)},
        {"recompute": SELECTIVE, "offload": Offload(optimizer_state=True, gradients=parameters)},
    )
    number = 0
    groups = []
    for group in plan.groups:
        replicas = []
        for each in group.replicas:
            replicas.append(dataclasses.replace(each, **own[number % len(own)]))
            number += 1
        groups.append(dataclasses.replace(group, replicas=tuple(replicas)))
    return dataclasses.replace(plan, groups=tuple(groups))


def in_the_host(plan: Plan) -> Plan:
    """The plan with all that can wait in the host there."""
    return with_settings(
        plan, FULL, parameters=True, gradients=True, optimizer_state=True, activations=True
    )


def split(plan: Plan, *numbers: int) -> Plan:
    """The plan with `split_backward` in some groups; without numbers in all."""
    return dataclasses.replace(
        plan,
        groups=tuple(
            dataclasses.replace(group, split_backward=not numbers or number in numbers)
            for number, group in enumerate(plan.groups)
        ),
    )


def sending_in(plan: Plan, *dtypes: Literal["bf16", "fp16"] | None) -> Plan:
    """The plan, with a type for each group to send gradients in."""
    groups = [
        dataclasses.replace(group, grad_reduce_dtype=dtype)
        for group, dtype in zip(plan.groups, dtypes, strict=True)
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def in_regions(plan: Plan, *regions: str) -> Plan:
    """The plan, with the replicas of each group in these regions, one letter for each."""
    groups = []
    for group, letters in zip(plan.groups, regions, strict=True):
        placed = zip(group.replicas, letters, strict=True)
        replicas = tuple(dataclasses.replace(each, region=region) for each, region in placed)
        groups.append(dataclasses.replace(group, replicas=replicas))
    return dataclasses.replace(plan, groups=tuple(groups))


def hierarchical(plan: Plan, regions: str) -> Plan:
    """The plan, with the first group's replicas in these regions and its sums in two levels."""
    first, *others = plan.groups
    alone = dataclasses.replace(plan, groups=(first,))
    (placed,) = in_regions(alone, regions).groups
    placed = dataclasses.replace(placed, hierarchical=True)
    return dataclasses.replace(plan, groups=(placed, *others))


TRIO = plan_of(
    ((replica(0, 1, 3, 1.0), replica(1, 1, 4, 3.0), replica(2, 1, 1, 1.0)), 2),
    ((replica(3, 4, 2),), 2),
)


def offloading_gradients(plan: Plan, gradients: bool) -> Plan:
    """The plan; all ranks offload gradients beside what they offload, or none does."""

    def own(offload: Offload | None) -> Offload:
        return dataclasses.replace(offload or Offload(), gradients=gradients)

    groups = [
        dataclasses.replace(
            group,
            offload=own(group.offload),
            replicas=tuple(
                dataclasses.replace(each, offload=own(each.offload)) if each.offload else each
                for each in group.replicas
            ),
        )
        for group in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))
