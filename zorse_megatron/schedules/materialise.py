"""When a group unshards and reshards its chunks' parameters.

A group works through *units*: each is one chunk, whose parameters must be unsharded while it lasts.
The chunk of the next unit is gathered while the current one runs, after the release of the
previous one; so at most two chunks are unsharded at a time. A chunk that the next unit needs again
is kept instead: it would be gathered again at once.

With shards that wait in host memory, each is fetched one unit before it is gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.schedules.actions import Action, Kind

_FETCHED_AHEAD = 2
"""A chunk's shard is fetched this many units before the chunk is used, and gathered one before."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Work on one chunk between two moments at which a group changes what is unsharded."""

    chunk: int
    ends_backward: bool
    """Whether the chunk's last backward is in it, so that its gradients are complete."""


def between_units(
    units: Sequence[Unit], *, resident: bool, offload: bool
) -> list[tuple[Action, ...]]:
    """For each unit the group's actions before it, and last those at the end.

    `resident`: parameters stay unsharded, so that only gradients are reduced. `offload`: shards
    of some ranks wait in host memory; the others skip FETCH and OFFLOAD. The reduction comes
    first, because it frees the gradients before those of the unit after next are made.
    """
    chunks = [unit.chunk for unit in units]
    found = []
    for at in range(len(units) + 1):
        actions: list[Action] = []
        if at > 0 and units[at - 1].ends_backward:
            actions.append(Action(kind=Kind.REDUCE, chunk=chunks[at - 1]))
        if not resident:
            actions += _moves(chunks, at, offload=offload)
        found.append(tuple(actions))
    return found


def _moves(chunks: Sequence[int], at: int, *, offload: bool) -> list[Action]:
    """RELEASE and OFFLOAD of the unit before `at`; GATHER and FETCH for those after it."""
    steps: list[tuple[Kind, int]] = []
    if at > 0 and not _is_kept(chunks, at):
        steps.append((Kind.RELEASE, chunks[at - 1]))
        if offload and chunks[at - 1] not in chunks[at : at + _FETCHED_AHEAD + 1]:
            steps.append((Kind.OFFLOAD, chunks[at - 1]))
    if at == 0 and offload:
        steps.append((Kind.FETCH, chunks[0]))
    if at < len(chunks) and (at == 0 or chunks[at] == chunks[at - 1]):
        steps.append((Kind.GATHER, chunks[at]))  # it had to wait for the release
    if at == 0 and offload and _is_fetched(chunks, 1):
        steps.append((Kind.FETCH, chunks[1]))
    if at + 1 < len(chunks) and chunks[at + 1] != chunks[at] and not _is_kept(chunks, at):
        steps.append((Kind.GATHER, chunks[at + 1]))
    if offload and _is_fetched(chunks, at + _FETCHED_AHEAD):
        steps.append((Kind.FETCH, chunks[at + _FETCHED_AHEAD]))
    return [Action(kind=kind, chunk=chunk) for kind, chunk in steps]


def _is_kept(chunks: Sequence[int], at: int) -> bool:
    """Whether the chunk of the unit before `at` is that of the unit after it, too."""
    return 0 < at < len(chunks) - 1 and chunks[at - 1] == chunks[at + 1] != chunks[at]


def _is_fetched(chunks: Sequence[int], at: int) -> bool:
    """Whether the shard is in host memory when it is time to fetch it for unit `at`."""
    first = max(0, at - _FETCHED_AHEAD - 1)
    return at < len(chunks) and chunks[at] not in chunks[first:at]
