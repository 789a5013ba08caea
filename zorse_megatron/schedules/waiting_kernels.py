"""How many of a rank's NCCL kernels can wait for other ranks at the same time.

A kernel occupies multiprocessors from when it starts until all of its ranks have started theirs. It
starts after a point of the rank's main stream, and the main stream waits for its end at a later
one; both are positions of the list. While the main stream stands between two computations, only
kernels whose span covers that place can be on the GPU, and of each communicator only one, as it
runs them one after the other. So the most that any place has is a bound, whatever other ranks, the
host and the hardware queues do: it takes no more of the others' lists than that they are there.

A bound below a GPU's multiprocessors proves that a kernel always finds room, and that room is left
for the computations that others wait for. `scripts.launch_order` compares it with what can happen.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.schedules.actions import COMPUTE, RECEIVES, SENDS, Action, Kind
from zorse_megatron.schedules.receive_openings import receive_openings
from zorse_megatron.schedules.send_closings import send_closings

Link = tuple[int, int]
"""(source rank, target rank)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A message's kernel may wait while the main stream comes to the actions first .. last."""

    first: int
    last: int
    link: Link


def message_spans(rank: int, actions: Sequence[Action]) -> Iterator[Span]:
    """Yield when the kernels of a rank's messages may wait, in the order of its list."""
    openings, closings = receive_openings(actions), send_closings(actions)
    consumers = {
        (action.kind is Kind.FORWARD, action.chunk, action.micro_batch): at
        for at, action in enumerate(actions)
        if action.kind in COMPUTE
    }
    for at, action in enumerate(actions):
        if action.kind in SENDS:
            assert action.peer is not None
            yield Span(first=at, last=closings[at], link=(rank, action.peer))
        elif action.kind in RECEIVES:
            assert action.peer is not None
            forward = action.kind is Kind.RECEIVE_ACTIVATION
            consumer = consumers[forward, action.chunk, action.micro_batch]
            yield Span(first=openings[at], last=consumer, link=(action.peer, rank))


def most_waiting(
    rank: int,
    actions: Sequence[Action],
    *,
    link_ctas: Mapping[Link, int] | None = None,
    others: int = 2,
) -> int:
    """Return the most multiprocessors that a rank's waiting kernels can hold at once.

    `link_ctas`: those of each link's kernels; None: one each, so that kernels are counted.
    `others`: those of the group's communicator and the world's together, which count as if they
    always waited. O(actions x log actions).
    """
    changes: list[tuple[int, int, Link]] = []
    for span in message_spans(rank, actions):
        changes += [(span.first, 1, span.link), (span.last + 1, -1, span.link)]
    changes.sort(key=lambda change: change[:2])
    there: Counter[Link] = Counter()
    held = most = 0
    for _, change, link in changes:
        before = there[link] > 0
        there[link] += change
        own = 1 if link_ctas is None else link_ctas[link]
        held += own * ((there[link] > 0) - before)
        most = max(most, held)
    return most + others
