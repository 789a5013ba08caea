"""From a plan to one list of actions per rank.

The plan's schedule is simulated once, which gives an order to all that happens; each rank's list is
its part of that sequence, so no order of execution can deadlock (see `sequence`). From which point
of its list on a rank has a buffer for what it receives is a function of the list
(`receive_openings`).

Recomputation and the offload of optimizer state and activations change what an action does, not
which actions there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from zorse_megatron.schedules.actions import Action, ActionLists
from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.breadth_first import (
    RESIDENT,
    parameters_setting,
    simulate_breadth_first,
)
from zorse_megatron.schedules.events import Event, GroupEvent
from zorse_megatron.schedules.gradient_offloads import with_gradient_offloads
from zorse_megatron.schedules.interleaved import interleaved
from zorse_megatron.schedules.one_f_one_b import one_f_one_b
from zorse_megatron.schedules.policy import Worker
from zorse_megatron.schedules.refusals import refuse_unlowered
from zorse_megatron.schedules.sequence import cut_into_lists
from zorse_megatron.schedules.timed_transfers import pipeline_for
from zorse_megatron.schedules.update import reductions, update_actions
from zorse_megatron.schema.plan.memory_settings import ranks_that_offload_gradients
from zorse_megatron.schema.plan.plan import Plan

_POLICIES = {"1f1b": one_f_one_b, "interleaved": interleaved}


def lower_plan(
    plan: Plan,
    *,
    forward_only: bool = False,
    tied: bool | None = None,
    most_in_flight: Mapping[Worker, int] | None = None,
) -> ActionLists:
    """Lower a plan to action lists, for a training step or (forward_only) an evaluation step.

    `tied`: whether the embedding and the output weight are one; None takes it from the plan's
    model. `most_in_flight`: micro-batches that replicas may have in flight beside what the schedule
    says, where it has limits. Raises PlanError with everything that cannot be lowered.
    """
    return _lowered(plan, forward_only=forward_only, tied=tied, most_in_flight=most_in_flight)[0]


def in_flight_limits(plan: Plan) -> Mapping[Worker, int]:
    """Most micro-batches in flight by the plan's schedule; none where that has no limits."""
    policy = _POLICIES.get(plan.schedule.name)
    return {} if policy is None else policy(plan).limits


def lower_unless_stuck(plan: Plan, *, forward_only: bool = False) -> ActionLists | None:
    """The same; None where the simulation gets stuck on its own rules.

    It then prefers one of several equal replicas.
    """
    lists, was_stuck = _lowered(plan, forward_only=forward_only, tied=None)
    return None if was_stuck else lists


def _lowered(
    plan: Plan,
    *,
    forward_only: bool,
    tied: bool | None,
    most_in_flight: Mapping[Worker, int] | None = None,
) -> tuple[ActionLists, bool]:
    """The lists, and whether the simulation got stuck."""
    refuse_unlowered(plan)
    if tied is None:
        tied = bool(plan.model.tied_embeddings)
    boundaries = Boundaries(plan)
    events, group_events, was_stuck = _simulate(
        plan, boundaries, most_in_flight or {}, forward_only=forward_only
    )
    lists: list[Sequence[Action]] = list(cut_into_lists(plan, boundaries, events, group_events))
    if not forward_only:
        gathers = parameters_setting(plan) == RESIDENT
        for number, group in enumerate(plan.groups):
            update = update_actions(plan, number, tied=tied, gathers=gathers)
            for rank in group.ranks:
                lists[rank] = [*lists[rank], *update]
        ends = {0, len(plan.chunks) - 1} if tied else set()
        for rank in ranks_that_offload_gradients(plan):
            lists[rank] = list(with_gradient_offloads(lists[rank], stay=ends))
    return ActionLists(ranks=tuple(map(tuple, lists))), was_stuck


def _simulate(
    plan: Plan, boundaries: Boundaries, most: Mapping[Worker, int], *, forward_only: bool
) -> tuple[Sequence[Event], Sequence[GroupEvent], bool]:
    """All events, and whether the simulation got stuck on its own rules."""
    if plan.schedule.name == "breadth_first":
        return *simulate_breadth_first(plan, boundaries, forward_only=forward_only), False
    policy = _POLICIES[plan.schedule.name](plan)
    limits = {key: min(limit, most.get(key, limit)) for key, limit in policy.limits.items()}
    policy = replace(policy, limits=limits)
    pipeline = pipeline_for(plan, boundaries, policy, forward_only=forward_only)
    events = list(pipeline.simulate())
    group_events = [] if forward_only else reductions(boundaries, events)
    return events, group_events, pipeline.was_stuck
