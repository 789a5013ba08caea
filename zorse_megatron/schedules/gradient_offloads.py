"""When a rank's shards of gradients leave for the host.

The sum of a chunk's gradients is waited for when the next chunk of the group is to be reduced. The
shard leaves then, and has a visit's time for it. Two kinds of chunks stay on the GPU: that which is
reduced last, as the step follows at once, and those whose gradients TIE adds to.
"""

from collections.abc import Collection, Iterator, Sequence

from zorse_megatron.schedules.actions import Action, Kind


def with_gradient_offloads(
    actions: Sequence[Action], stay: Collection[int] = ()
) -> Iterator[Action]:
    """Yield a rank's list with an OFFLOADG before the REDUCE that follows that of its chunk.

    `stay`: chunks whose gradients stay on the GPU.
    """
    reduced: int | None = None
    for action in actions:
        if action.kind is Kind.REDUCE:
            if reduced is not None and reduced not in stay:
                yield Action(kind=Kind.OFFLOAD_GRADIENTS, chunk=reduced)
            reduced = action.chunk
        yield action


def offloaded_gradients(actions: Sequence[Action]) -> frozenset[int]:
    """Chunks whose gradients wait in the host when a list comes to STEP."""
    found = (a.chunk for a in actions if a.kind is Kind.OFFLOAD_GRADIENTS)
    return frozenset(chunk for chunk in found if chunk is not None)
