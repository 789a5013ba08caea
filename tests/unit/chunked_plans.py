"""Plans with several chunks per group, for tests of schedules."""

import dataclasses
from collections.abc import Sequence

from tests.unit.test_schedules import even_plan
from zorse_megatron.plan.plan import Chunk, Plan, Schedule


def dealt_out(
    plan: Plan, num_chunks: int, *, schedule: str = "breadth_first", **parameters: str
) -> Plan:
    """The plan with chunks of one layer, dealt out to its groups in turn: `num_chunks` to each."""
    groups = len(plan.groups)
    return with_owners(
        plan, [chunk % groups for chunk in range(groups * num_chunks)], schedule, **parameters
    )


def with_owners(
    plan: Plan, owners: Sequence[int], schedule: str = "breadth_first", **parameters: str
) -> Plan:
    """The plan with chunks of one layer, held by these groups."""
    return dataclasses.replace(
        plan,
        model=dataclasses.replace(plan.model, num_layers=len(owners)),
        chunks=tuple(Chunk(group=g, layers=(c, c + 1)) for c, g in enumerate(owners)),
        schedule=Schedule(name=schedule, parameters=parameters),
    )


def ministages(stages: int, replicas: int, count: int, num_chunks: int, **parameters: str) -> Plan:
    """Equal groups with chunks dealt out in turn, breadth first."""
    return dealt_out(even_plan(stages, replicas, count), num_chunks, **parameters)
