"""Which forwards' activations wait in the host.

They leave beside the computation after their forward, and come back beside the one before their
backward. Where that is the same one, or the next one, nothing is computed while they are away: they
stay.
"""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import Action, Kind

Pass = tuple[int | None, int | None]
"""(chunk, micro-batch)"""


def leaving_activations(computations: Sequence[Action]) -> frozenset[Pass]:
    """Forwards of a rank whose activations leave, if it offloads them. O(computations).

    `computations`: the forwards and backwards of its list, in order.
    """
    return frozenset(
        _pass(action)
        for at, action in enumerate(computations)
        if action.kind is Kind.FORWARD
        and _pass(action) not in map(_pass, computations[at + 1 : at + 4])
    )


def _pass(action: Action) -> Pass:
    return action.chunk, action.micro_batch
