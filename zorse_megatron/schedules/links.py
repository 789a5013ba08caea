"""Which ranks of a plan send to which, and in which order their connections are made.

A link is one direction between two ranks. `list_queries.edges_of` finds the same in lowered
lists; this asks the plan alone, so that a plan's communicators can be priced without its lists.
"""

from collections.abc import Iterable

from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.sequence_slices import slice_pairs
from zorse_megatron.schema.plan.plan import Plan

Link = tuple[int, int]
"""(source rank, target rank)."""


def links_of(plan: Plan) -> tuple[Link, ...]:
    """Return all links of training, sorted: activations one way, their gradients the other."""
    ranks = [[replica.ranks for replica in group.replicas] for group in plan.groups]
    boundaries = Boundaries(plan)
    found: set[Link] = set()
    for chunk, boundary in enumerate(boundaries.after_chunk):
        if boundary.is_local:
            continue
        here, there = (ranks[boundaries.groups[number]] for number in (chunk, chunk + 1))
        pairs = {
            (piece.source.replica, piece.target.replica)
            for pieces in boundary.by_source.values()
            for piece in pieces
        }
        for source, target in pairs:
            senders, receivers = here[source], there[target]
            for pair in slice_pairs(len(senders), len(receivers)):
                sender, receiver = senders[pair.source], receivers[pair.target]
                found |= {(sender, receiver), (receiver, sender)}
    return tuple(sorted(found))


def in_rounds(links: Iterable[Link]) -> list[Link]:
    """Return the links in an order in which ranks need not wait long for one another.

    Connecting blocks both ends. In the order of the result, cut into rounds in which no rank
    appears twice, all of a round can connect at once; each link is in the first round that has
    neither of its ranks, so there are fewer than twice as many rounds as links of the busiest rank.
    """
    rounds: list[list[Link]] = []
    busy: list[set[int]] = []
    for link in links:
        number = next((n for n, ranks in enumerate(busy) if ranks.isdisjoint(link)), len(busy))
        if number == len(busy):
            rounds.append([])
            busy.append(set())
        rounds[number].append(link)
        busy[number].update(link)
    return [link for each in rounds for link in each]
