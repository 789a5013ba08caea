"""From a plan to one list of actions per rank.

The plan's schedule is simulated once, which gives an order to all that happens; each rank's list is
its part of that sequence, so no order of execution can deadlock (see `sequence`). The receives are
then started two computations earlier than that, so that they overlap with those; where starting a
receive never waits, as with gloo, this keeps the property (see `validate`). NCCL's receives occupy
a hardware queue until they are matched, so there they stay where they are
(`early_receives=False`).

Recomputation and the offload of optimizer state and activations change what an action does, not
which actions there are.
"""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import COMPUTE, RECEIVES, Action, ActionLists
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

# How many computations a receive is started early. One hides a message behind a single computation,
# which is not enough where several replicas send over one slow link at once; more than two bring
# nothing more, and each costs a buffer. So it is where a plan gives slow transfers, too: in
# that order a receive already stands where its message is sent. (Two regions, 11 plans simulated
# with four instead of two: 1.1616 times the bound with both, 1.3800 for 1.3777, none better.)
_AHEAD = 2
_POLICIES = {"1f1b": one_f_one_b, "interleaved": interleaved}


def lower_plan(
    plan: Plan,
    *,
    forward_only: bool = False,
    tied: bool | None = None,
    early_receives: bool = True,
) -> ActionLists:
    """Lower a plan to action lists, for a training step or (forward_only) an evaluation step.

    `tied`: whether the embedding and the output weight are one; None takes it from the plan's
    model. `early_receives`: start receives two computations early; without it the lists run even
    where every transfer blocks. Raises PlanError with everything that cannot be lowered.
    """
    refuse_unlowered(plan)
    if tied is None:
        tied = bool(plan.model.tied_embeddings)
    boundaries = Boundaries(plan)
    events, group_events = _simulate(plan, boundaries, forward_only=forward_only)
    lists: list[Sequence[Action]] = list(cut_into_lists(plan, boundaries, events, group_events))
    if early_receives:
        lists = [_receive_early(actions) for actions in lists]
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


def _receive_early(actions: Sequence[Action]) -> list[Action]:
    """Start each receive `_AHEAD` computations earlier, so that it overlaps with those.

    Receives keep their order among themselves, hence on each pair of ranks.
    """
    stops = [0] * _AHEAD + [at for at, action in enumerate(actions) if action.kind in COMPUTE]
    at_stop: dict[int, list[Action]] = {}
    passed = 0
    for action in actions:
        if action.kind in COMPUTE:
            passed += 1
        elif action.kind in RECEIVES:
            at_stop.setdefault(stops[passed], []).append(action)
    moved: list[Action] = []
    for at, action in enumerate(actions):
        moved += at_stop.get(at, ())
        if action.kind not in RECEIVES:
            moved.append(action)
    return moved
