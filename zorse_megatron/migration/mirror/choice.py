"""What the copies that survived are good for: the newest iteration of which there are all ranks."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, order=True)
class Copy:
    """One rank's state after an iteration, complete, in the memory of a node."""

    iteration: int
    world_size: int
    """Ranks that there were."""
    start: str
    """A name drawn at each start of the ranks: an iteration that was trained a second time, under
    another plan, may differ in the last bits, and the two must not be mixed."""
    rank: int
    node: str
    """That has it."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An iteration that can be gone on from."""

    iteration: int
    start: str
    nodes: tuple[str, ...]
    """Of each rank that there was: the node whose copy is read."""


def newest_whole(copies: Iterable[Copy]) -> Whole | None:
    """Return the newest iteration with a copy of every rank; None: there is none.

    Of several copies of a rank, the one on the node that has fewest to read so far.
    """
    found: dict[tuple[int, str, int], dict[int, set[str]]] = {}
    for each in copies:
        ranks = found.setdefault((each.iteration, each.start, each.world_size), {})
        ranks.setdefault(each.rank, set()).add(each.node)
    whole = [key for key, ranks in found.items() if ranks.keys() == set(range(key[2]))]
    if not whole:
        return None
    best = max(whole)
    reads: dict[str, int] = {}
    nodes = []
    for rank in range(best[2]):
        node = min(found[best][rank], key=lambda name: (reads.get(name, 0), name))
        reads[node] = reads.get(node, 0) + 1
        nodes.append(node)
    return Whole(iteration=best[0], start=best[1], nodes=tuple(nodes))


def what_is_missing(copies: Iterable[Copy]) -> str:
    """Say, for an error or a log, of which ranks the newest copies are not there.

    >>> what_is_missing([Copy(iteration=7, world_size=3, start="s", rank=1, node="a")])
    'of iteration 7 the copies of ranks 0, 2 (of 3) are lost'
    """
    everything = list(copies)
    if not everything:
        return "there is no copy of any rank on these nodes"
    newest = max(everything)
    here = {each.rank for each in everything if _same_state(each, newest)}
    lost = ", ".join(str(rank) for rank in range(newest.world_size) if rank not in here)
    if not lost:
        return f"of iteration {newest.iteration} no copy is lost"
    ranks = "rank" if lost.isdigit() else "ranks"
    copies_are = "copy" if lost.isdigit() else "copies"
    verb = "is" if lost.isdigit() else "are"
    return (
        f"of iteration {newest.iteration} the {copies_are} of {ranks} {lost} "
        f"(of {newest.world_size}) {verb} lost"
    )


def _same_state(first: Copy, second: Copy) -> bool:
    return (first.iteration, first.start, first.world_size) == (
        second.iteration,
        second.start,
        second.world_size,
    )
