"""Until when a message that was sent may be on its way: for some computations after its place.

The counterpart of `receive_openings`. A send only starts a transfer; some computations later the
rank's main stream waits until the message has left, and its memory is free. So what a rank holds of
messages, and how many kernels of NCCL wait on its GPU for other ranks (`waiting_kernels`), are
functions of its list: they depend neither on how far the host is ahead of the GPU nor on how slow
other ranks are.

The wait cannot make ranks wait for each other forever: lists run even where a rank waits for every
send at its own place (see `sequence`).
"""

from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import COMPUTE, SENDS, Action, Kind

# How many computations may begin before a message must have left. Fewer hold back ranks that send
# over slow, shared links; more hold memory and multiprocessors (docs/simulator.md has the table).
SENDS_BEHIND = 6


def send_closings(actions: Sequence[Action], *, behind: int = SENDS_BEHIND) -> Mapping[int, int]:
    """Position of each send -> position of the action before which it must have left.

    That is the computation that has `behind` others between the send and itself; NORM if there are
    not as many, or the end of a list that has none. Sends are closed in the order of the list.
    """
    last = next((at for at, a in enumerate(actions) if a.kind is Kind.NORM), len(actions))
    computations = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
    closings: dict[int, int] = {}
    num_before = 0
    for position, action in enumerate(actions):
        if action.kind in COMPUTE:
            num_before += 1
        elif action.kind in SENDS:
            number = num_before + behind
            closings[position] = computations[number] if number < len(computations) else last
    return closings
