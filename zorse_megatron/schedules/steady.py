"""A list as it repeats: from one NORM to the next.

All ranks meet at NORM, with nothing of theirs under way: it waits for every collective, copy and
send of the rank. So an iteration lasts from one NORM to the next, whatever was before: ranks step
and gather while others, or they themselves, are in the first passes of the next iteration.
"""

from collections.abc import Sequence

from zorse_megatron.schedules.actions import Action, Kind


def from_norm(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The list from behind its NORM around to it; as it is where it has none."""
    cut = num_before_update(actions)
    return (*actions[cut:], *actions[:cut])


def num_before_update(actions: Sequence[Action]) -> int:
    """How many actions come before the update, NORM included; all where there is none."""
    norms = [at for at, action in enumerate(actions) if action.kind is Kind.NORM]
    return norms[0] + 1 if norms else len(actions)
