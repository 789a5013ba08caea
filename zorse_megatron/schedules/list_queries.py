"""Queries on lists of actions."""

from collections.abc import Iterable, Sequence

from zorse_megatron.schedules.actions import SENDS, Action, ActionLists, Kind

_PLACES = frozenset({Kind.FETCH, Kind.OFFLOAD})


def edges_of(each: Iterable[ActionLists]) -> list[tuple[int, int]]:
    """All pairs (source, target) of ranks that send, in one order that every rank derives."""
    return sorted(
        {
            (rank, action.peer)
            for lists in each
            for rank, actions in enumerate(lists.ranks)
            for action in actions
            if action.kind in SENDS and action.peer is not None
        }
    )


def released_chunks(actions: Sequence[Action]) -> frozenset[int]:
    """Chunks of which a rank keeps only shards: their parameters are released."""
    return frozenset(a.chunk for a in actions if a.kind is Kind.RELEASE and a.chunk is not None)


def chunks_left_in_host(actions: Sequence[Action]) -> frozenset[int]:
    """Chunks whose parameters are in the host when a list ends, hence when it starts again."""
    last = {a.chunk: a.kind for a in actions if a.kind in _PLACES}
    return frozenset(c for c, kind in last.items() if kind is Kind.OFFLOAD and c is not None)
