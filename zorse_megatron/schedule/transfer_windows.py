"""When a transfer may begin before its place in the list, and end after it.

A receive stands in the list where the sequence has its transfer (see `sequence`), after everything
that has to happen first, so lists run even where every transfer blocks. That is where NCCL ranks
launch it. Its buffer is there earlier, when the rank's main stream comes to the second computation
before that place; from then on the message may arrive, beside the computations. So there are two
orders: what is launched when, which excludes deadlocks, and what may run when, which is a function
of the same list.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from zorse_megatron.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind

# How many computations a receive's buffer is there before its place in the list. With one, messages
# that take longer than a computation are waited for; a third brings nothing more, and each costs
# buffers (`scripts/receives_ahead.py` shows it). So it is where a plan gives slow transfers, too:
# there a receive already stands where its message is sent.
RECEIVES_AHEAD = 2


def receives_posted_at(
    actions: Sequence[Action], *, ahead: int = RECEIVES_AHEAD
) -> Mapping[int, int]:
    """Position of each receive -> position of the action before which its buffer is opened.

    That is `ahead` computations before the receive's own place, or the start of the list. Receives
    are opened in the order of the list, hence in one order on each pair of ranks.
    """
    stops = [0] * ahead
    posted_at: dict[int, int] = {}
    for position, action in enumerate(actions):
        if action.kind in COMPUTE:
            stops.append(position)
        elif action.kind in RECEIVES:
            posted_at[position] = stops[-ahead] if ahead else position
    return posted_at


# Until when a message that was sent may be on its way: for some computations after its place.
#
# The counterpart of `receives_posted_at`. A send only starts a transfer; some computations later
# the rank's main stream waits until the message has left, and its memory is free. So what a rank
# holds of messages, and how many kernels of NCCL wait on its GPU for other ranks (`communicators`),
# are functions of its list: they depend neither on how far the host is ahead of the GPU nor on how
# slow other ranks are.
#
# The wait cannot make ranks wait for each other forever: lists run even where a rank waits for
# every send at its own place (see `sequence`).


# How many computations may begin before a message must have left. Fewer hold back ranks that send
# over slow, shared links; more hold memory and multiprocessors (`scripts/receives_ahead.py`).
SENDS_BEHIND = 6


def sends_waited_at(actions: Sequence[Action], *, behind: int = SENDS_BEHIND) -> Mapping[int, int]:
    """Position of each send -> position of the action before which it must have left.

    That is the computation that has `behind` others between the send and itself; NORM if there are
    not as many, or the end of a list that has none. Sends are closed in the order of the list.
    """
    last = next((at for at, a in enumerate(actions) if a.kind is Kind.NORM), len(actions))
    computations = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
    waited_at: dict[int, int] = {}
    num_before = 0
    for position, action in enumerate(actions):
        if action.kind in COMPUTE:
            num_before += 1
        elif action.kind in SENDS:
            number = num_before + behind
            waited_at[position] = computations[number] if number < len(computations) else last
    return waited_at


# Which forwards' activations wait in the host.
#
# They leave beside the next forward, at whose end the rank waits until they have left, and come
# back beside the computation before their backward. Where no computation is between the two, they
# stay. So what is on the GPU follows from the list, not from how far the host is ahead.


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


def most_away(actions: Sequence[Action], bytes_of: Mapping[int, int]) -> int:
    """The most bytes of activations in the host at one time while a list runs.

    `bytes_of`: chunk -> what a micro-batch of it keeps.
    """
    computations = [action for action in actions if action.kind in COMPUTE]
    leaving = leaving_activations(computations)
    away = highest = 0
    for action in computations:
        if _pass(action) not in leaving:
            continue
        num_bytes = bytes_of[action.chunk or 0]
        away += num_bytes if action.kind is Kind.FORWARD else -num_bytes
        highest = max(highest, away)
    return highest


def _pass(action: Action) -> Pass:
    return action.chunk, action.micro_batch


# When a rank's shards of gradients leave for the host.
#
# The sum of a chunk's gradients is waited for when the next chunk of the group is to be reduced.
# The shard leaves then, and has a visit's time for it. Two kinds of chunks stay on the GPU: that
# which is reduced last, as the step follows at once, and those whose gradients TIE adds to.


def with_gradient_offloads(
    actions: Sequence[Action], stay: Collection[int] = ()
) -> Iterator[Action]:
    """Yield a rank's list with an OFFLOAD_GRAD before the REDUCE_GRAD that follows that of its
    chunk.

    `stay`: chunks whose gradients stay on the GPU.
    """
    reduced: int | None = None
    for action in actions:
        if action.kind is Kind.REDUCE_GRAD:
            if reduced is not None and reduced not in stay:
                yield Action(kind=Kind.OFFLOAD_GRAD, chunk=reduced)
            reduced = action.chunk
        yield action


def offloaded_gradients(actions: Sequence[Action]) -> frozenset[int]:
    """Chunks whose gradients wait in the host when a list comes to STEP."""
    found = (a.chunk for a in actions if a.kind is Kind.OFFLOAD_GRAD)
    return frozenset(chunk for chunk in found if chunk is not None)
