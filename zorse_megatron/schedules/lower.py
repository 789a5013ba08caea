"""From a plan to one list of actions per rank.

The plan's schedule is simulated once, which gives an order to all that happens; each rank's list is
its part of that sequence, so no order of execution can deadlock (see `sequence`). From which point
of its list on a rank has a buffer for what it receives is a function of the list
(`receive_openings`).

Recomputation and the offload of optimizer state and activations change what an action does, not
which actions there are.
"""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import Action, ActionLists
from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.breadth_first import (
    RESIDENT,
    parameters_setting,
    simulate_breadth_first,
)
from zorse_megatron.schedules.events import Event, GroupEvent
from zorse_megatron.schedules.interleaved import interleaved
from zorse_megatron.schedules.one_f_one_b import one_f_one_b
from zorse_megatron.schedules.order import Pipeline
from zorse_megatron.schedules.refusals import refuse_unlowered
from zorse_megatron.schedules.sequence import cut_into_lists
from zorse_megatron.schedules.timed_transfers import pipeline_for
from zorse_megatron.schedules.update import reductions, update_actions
from zorse_megatron.schema.plan.plan import Plan

_POLICIES = {"1f1b": one_f_one_b, "interleaved": interleaved}


def lower_plan(plan: Plan, *, forward_only: bool = False, tied: bool | None = None) -> ActionLists:
    """Lower a plan to action lists, for a training step or (forward_only) an evaluation step.

    `tied`: whether the embedding and the output weight are one; None takes it from the plan's
    model. Raises PlanError with everything that cannot be lowered.
    """
    refuse_unlowered(plan)
    if tied is None:
        tied = bool(plan.model.tied_embeddings)
    boundaries = Boundaries(plan)
    events, group_events = _simulate(plan, boundaries, forward_only=forward_only)
    lists: list[Sequence[Action]] = list(cut_into_lists(plan, boundaries, events, group_events))
    if not forward_only:
        gathers = parameters_setting(plan) == RESIDENT
        for number, group in enumerate(plan.groups):
            update = update_actions(plan, number, tied=tied, gathers=gathers)
            for rank in group.ranks:
                lists[rank] = [*lists[rank], *update]
    return ActionLists(ranks=tuple(map(tuple, lists)))


def may_favour_a_replica(plan: Plan, *, forward_only: bool) -> bool:
    """Whether the simulation gets stuck on its own rules and then prefers one of several equals."""
    if plan.schedule.name == "breadth_first":
        return False
    pipeline = _pipeline(plan, Boundaries(plan), forward_only=forward_only)
    for _ in pipeline.simulate():
        pass
    return pipeline.was_stuck


def _simulate(
    plan: Plan, boundaries: Boundaries, *, forward_only: bool
) -> tuple[Sequence[Event], Sequence[GroupEvent]]:
    if plan.schedule.name == "breadth_first":
        return simulate_breadth_first(plan, boundaries, forward_only=forward_only)
    events = list(_pipeline(plan, boundaries, forward_only=forward_only).simulate())
    return events, [] if forward_only else reductions(boundaries, events)


def _pipeline(plan: Plan, boundaries: Boundaries, *, forward_only: bool) -> Pipeline:
    policy = _POLICIES[plan.schedule.name](plan)
    return pipeline_for(plan, boundaries, policy, forward_only=forward_only)
