"""Groupings near a given one, for local search."""

from collections.abc import Iterator
from itertools import combinations, islice

from zorse_megatron.costs.topology import Topology
from zorse_megatron.planner.groupings.pools import Grouping, normalised
from zorse_megatron.planner.groupings.proposals import GroupingProposal
from zorse_megatron.planner.groupings.symmetry import Symmetry


def neighbours(
    spec: Topology,
    grouping: Grouping,
    *,
    symmetry: Symmetry | None = None,
    limit: int = 200,
) -> Iterator[GroupingProposal]:
    """Yield up to `limit` groupings one step away, without the given one and its mirror images.

    Merges of two groups; splits of a group by region, by kind, or in halves along its nodes; moves
    of the GPUs that a group has on one node to another group. A step costs O(ranks).
    """
    symmetry = symmetry or Symmetry(spec)
    seen = {symmetry.signature(grouping)}
    yield from islice(_distinct(_all(spec, grouping), symmetry, seen), limit)


def _distinct(
    found: Iterator[GroupingProposal], symmetry: Symmetry, seen: set[int]
) -> Iterator[GroupingProposal]:
    for proposal in found:
        signature = symmetry.signature(proposal.grouping)
        if signature not in seen:
            seen.add(signature)
            yield proposal


def _all(spec: Topology, grouping: Grouping) -> Iterator[GroupingProposal]:
    classes = _classes(spec, grouping)
    yield from _merges(grouping, classes)
    yield from _splits(spec, grouping, classes)
    yield from _moves(spec, grouping, classes)


def _classes(spec: Topology, grouping: Grouping) -> list[int]:
    """Equal numbers for groups that are alike by themselves, to skip most mirror images early."""
    numbers: dict[object, int] = {}
    classes = []
    for group in grouping:
        by_node: dict[int, list[str]] = {}
        for rank in group:
            node = spec.node_of(rank)
            kind = spec.nodes[node].gpu_kinds[rank - spec.first_ranks[node]]
            by_node.setdefault(node, []).append(kind)
        places = [
            (spec.nodes[node].region, str(spec.nodes[node].switch), tuple(sorted(kinds)))
            for node, kinds in by_node.items()
        ]
        classes.append(numbers.setdefault(tuple(sorted(places)), len(numbers)))
    return classes


def _merges(grouping: Grouping, classes: list[int]) -> Iterator[GroupingProposal]:
    done = set()
    for first, second in combinations(range(len(grouping)), 2):
        # Two groups that share nodes are not like two that do not.
        key = (classes[first], classes[second])
        if key in done and len(grouping) > _EVERY_PAIR_UP_TO:
            continue
        done.add(key)
        rest = _others(grouping, first, second)
        together = grouping[first] + grouping[second]
        yield GroupingProposal(grouping=normalised([*rest, together]), origin="merge")


# Beyond so many groups only one pair of two looks is merged, and one pair is moved between.
_EVERY_PAIR_UP_TO = 12


def _splits(spec: Topology, grouping: Grouping, classes: list[int]) -> Iterator[GroupingProposal]:
    done = set()
    for number, group in enumerate(grouping):
        if classes[number] in done:
            continue
        done.add(classes[number])
        for first in _halves(spec, group):
            second = sorted(set(group) - set(first))
            if first and second:
                rest = _others(grouping, number)
                yield GroupingProposal(grouping=normalised([*rest, first, second]), origin="split")


def _halves(spec: Topology, group: tuple[int, ...]) -> Iterator[list[int]]:
    """One side of each way to split a group in two."""
    nodes = {rank: spec.node_of(rank) for rank in group}
    regions = dict.fromkeys(spec.nodes[node].region for node in nodes.values())
    for region in regions:
        yield [rank for rank in group if spec.nodes[nodes[rank]].region == region]
    kind_of = {
        rank: spec.nodes[node].gpu_kinds[rank - spec.first_ranks[node]]
        for rank, node in nodes.items()
    }
    for kind in dict.fromkeys(kind_of.values()):
        yield [rank for rank in group if kind_of[rank] == kind]
    order = list(dict.fromkeys(nodes.values()))
    for count in sorted({1, len(order) // 2, len(order) - 1}):
        chosen = set(order[:count])
        yield [rank for rank in group if nodes[rank] in chosen]
    for count in sorted({1, len(group) // 2}):
        yield list(group[:count])


def _moves(spec: Topology, grouping: Grouping, classes: list[int]) -> Iterator[GroupingProposal]:
    done = set()
    for source, group in enumerate(grouping):
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(spec.node_of(rank), []).append(rank)
        for target in range(len(grouping)):
            for node, ranks in by_node.items():
                key = (classes[source], classes[target], spec.nodes[node].gpu_kinds, len(ranks))
                many = len(grouping) > _EVERY_PAIR_UP_TO or len(by_node) > _EVERY_PAIR_UP_TO
                if source == target or (many and key in done):
                    continue
                done.add(key)
                for moved in dict.fromkeys((tuple(ranks), tuple(ranks[:1]))):
                    kept = [rank for rank in group if rank not in moved]
                    if not kept:
                        continue
                    rest = _others(grouping, source, target)
                    groups = [*rest, kept, (*grouping[target], *moved)]
                    yield GroupingProposal(grouping=normalised(groups), origin="move")


def _others(grouping: Grouping, *without: int) -> list[tuple[int, ...]]:
    return [group for number, group in enumerate(grouping) if number not in without]
