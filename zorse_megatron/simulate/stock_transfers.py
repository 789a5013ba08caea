"""Where Megatron's schedules post their transfers.

Interleaved: `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.19.2, with
`--overlap-p2p-communication-warmup-flush`: behind a computation it posts the send of what was
computed, and with it the receive for the next computation of the same kind. Ranks other than the
first (last) post receives of forwards in the warm-up (of backwards in the cool-down) one
computation sooner. So a rank that computes slowly posts late, and its neighbour, which stops until
its activation has left, waits for that.

1F1B: `forward_backward_pipelining_without_interleaving` sends what was computed and receives what
is computed next, both at once if one is an activation and the other a gradient
(`send_forward_recv_backward`), and goes on when both are done.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import COMPUTE, RECEIVES, Action, Kind

_BEFORE, _AS_IT_IS, _BEHIND = range(3)


def with_receives_posted(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The passes of a rank's list, with receives where Megatron posts them."""
    forwards, backwards = (_positions(actions, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
    if not forwards or not backwards:
        return tuple(actions)
    ready = sum(position < backwards[0] for position in forwards)
    # The first backward has a forward of the steady state before it, where there is one.
    warm_up = ready if ready == len(forwards) else ready - 1
    steady = len(forwards) - warm_up
    consumers = {_computed(actions[at]): n for s in (forwards, backwards) for n, at in enumerate(s)}
    fed = {_consumer(action) for action in actions if action.kind in RECEIVES}
    is_first = _computed(actions[forwards[0]]) not in fed
    is_last = _computed(actions[backwards[0]]) not in fed

    def place(position: int) -> tuple[int, int]:
        action = actions[position]
        if action.kind not in RECEIVES:
            return position, _AS_IT_IS
        number = consumers[_consumer(action)]
        if action.kind is Kind.RECEIVE_ACTIVATION and number:
            is_early = number <= warm_up and not is_first
            return forwards[number - 1], _BEFORE if is_early else _BEHIND
        if action.kind is Kind.RECEIVE_GRADIENT and number:
            is_early = number > steady and not is_last
            return backwards[number - 1], _BEFORE if is_early else _BEHIND
        if action.kind is Kind.RECEIVE_GRADIENT and steady:
            return forwards[warm_up], _BEFORE
        return position, _AS_IT_IS

    order = sorted(range(len(actions)), key=place)
    return tuple(actions[position] for position in order)


def with_receives_at_last(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same of 1F1B: each just before what it is for, so behind the sends that precede that."""
    consumers = {
        _computed(action): at for at, action in enumerate(actions) if action.kind in COMPUTE
    }

    def place(position: int) -> tuple[int, int]:
        action = actions[position]
        if action.kind in RECEIVES:
            return consumers[_consumer(action)], _BEFORE
        return position, _AS_IT_IS

    return tuple(actions[position] for position in sorted(range(len(actions)), key=place))


def gradient_closings(actions: Sequence[Action]) -> Mapping[int, int]:
    """Position of each gradient's send -> position of the action before which it must have left.

    The rank waits for it when it has posted the next one. For an activation it waits at once.
    """
    last = next((at for at, a in enumerate(actions) if a.kind is Kind.NORM), len(actions))
    backwards = [*_positions(actions, Kind.BACKWARD), last]
    computations = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
    closings = {}
    for position in _positions(actions, Kind.SEND_GRADIENT):
        following = backwards[bisect(backwards, position)]
        behind = bisect(computations, following)
        closings[position] = computations[behind] if behind < len(computations) else last
    return closings


def _positions(actions: Sequence[Action], kind: Kind) -> list[int]:
    return [at for at, action in enumerate(actions) if action.kind is kind]


def _computed(action: Action) -> tuple[bool, int | None, int | None]:
    return action.kind is Kind.FORWARD, action.chunk, action.micro_batch


def _consumer(action: Action) -> tuple[bool, int | None, int | None]:
    """What a receive is for."""
    return action.kind is Kind.RECEIVE_ACTIVATION, action.chunk, action.micro_batch
