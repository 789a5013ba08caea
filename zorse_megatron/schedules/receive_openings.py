"""When a receive may begin: earlier than its place in the list.

A receive stands in the list where the sequence has its transfer (see `sequence`), after everything
that has to happen first, so lists run even where every transfer blocks. That is where NCCL ranks
launch it. Its buffer is there earlier, when the rank's main stream comes to the second computation
before that place; from then on the message may arrive, beside the computations. So there are two
orders: what is launched when, which excludes deadlocks, and what may run when, which is a function
of the same list.
"""

from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import COMPUTE, RECEIVES, Action

# How many computations a receive's buffer is there before its place in the list. With one, messages
# that take longer than a computation are waited for; a third brings nothing more, and each costs
# buffers (docs/simulator.md has the table). So it is where a plan gives slow transfers, too: there
# a receive already stands where its message is sent.
RECEIVES_AHEAD = 2


def receive_openings(
    actions: Sequence[Action], *, ahead: int = RECEIVES_AHEAD
) -> Mapping[int, int]:
    """Position of each receive -> position of the action before which its buffer is opened.

    That is `ahead` computations before the receive's own place, or the start of the list. Receives
    are opened in the order of the list, hence in one order on each pair of ranks.
    """
    stops = [0] * ahead
    openings: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.kind in COMPUTE:
            stops.append(position)
        elif action.kind in RECEIVES:
            openings[position] = stops[-ahead] if ahead else position
    return openings
