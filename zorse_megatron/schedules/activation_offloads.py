"""Which forwards' activations wait in the host.

They leave beside the next forward, at whose end the rank waits until they have left, and come back
beside the computation before their backward. Where no computation is between the two, they stay. So
what is on the GPU follows from the list, not from how far the host is ahead.
"""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import Action, Kind

Pass = tuple[int | None, int | None]
"""(chunk, micro-batch)"""


def leaving_activations(computations: Sequence[Action]) -> frozenset[Pass]:
    """Forwards of a rank whose activations leave, if it offloads them. O(computations).

    `computations`: the forwards and backwards of its list, in order.
    """
    backward_at = {
        _pass(action): at for at, action in enumerate(computations) if action.kind is Kind.BACKWARD
    }
    leaving: set[Pass] = set()
    next_forward = len(computations)
    for at, action in reversed(list(enumerate(computations))):
        if action.kind is Kind.FORWARD:
            if next_forward + 2 < backward_at.get(_pass(action), 0):
                leaving.add(_pass(action))
            next_forward = at
    return frozenset(leaving)


def _pass(action: Action) -> Pass:
    return action.chunk, action.micro_batch
