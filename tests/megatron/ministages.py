"""Plans whose groups hold several chunks, for the tests that train."""

import dataclasses
from typing import Any

from tests.megatron.comparison import chunked_plan, replica
from zorse_megatron.plan.plan import Offload, Plan, Recompute, Schedule

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
