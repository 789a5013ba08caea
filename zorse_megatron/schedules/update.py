"""What follows the passes: complete gradients, then the optimizer step."""

from collections.abc import Iterable

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.events import Event, GroupEvent
from zorse_megatron.schema.plan.plan import Plan


def reductions(boundaries: Boundaries, events: Iterable[Event]) -> list[GroupEvent]:
    """A REDUCE of each chunk when its gradients are there; those of one moment in reverse order."""
    ends = [0] * (boundaries.last + 1)
    for event in events:
        if not event.forward:
            ends[event.chunk] = max(ends[event.chunk], event.end)
    return [
        GroupEvent(
            time=ends[chunk],
            group=boundaries.groups[chunk],
            actions=(Action(kind=Kind.REDUCE, chunk=chunk),),
        )
        for chunk in reversed(range(boundaries.last + 1))
    ]


def update_actions(plan: Plan, group: int, *, tied: bool, gathers: bool) -> list[Action]:
    """What a rank of a group does after its last reduction.

    The norm of the gradient is one of all chunks, so nothing steps before all are reduced. Then
    chunks step in the order in which the next iteration uses them. `gathers`: whether parameters
    are to be unsharded again.
    """
    chunks = plan.chunks_of_group(group)
    actions = []
    if tied and len(plan.chunks) > 1 and {0, len(plan.chunks) - 1} & set(chunks):
        actions.append(Action(kind=Kind.TIE))
    actions += [Action(kind=Kind.SCALE), Action(kind=Kind.NORM)]
    for chunk in chunks:
        actions.append(Action(kind=Kind.STEP, chunk=chunk))
        if gathers:
            actions.append(Action(kind=Kind.GATHER, chunk=chunk))
    return actions
