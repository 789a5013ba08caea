"""Which ranks might hold the same layers: groupings for the planner's search.

Families, taken in turn so that a cap leaves some of each:

- `together`: one group of all;
- `split`: SPLIT's k-cuts of the topology graph, k = 2, 3, ...;
- `by`: one group per GPU kind, region, switch, node, pool (like GPUs of a region), GPU;
- `pools`: each pool divided along its nodes into q groups, every q for every pool, pools merged or
  not. Merged pools give groups with a share of each.

Groupings that differ by a swap of identical nodes, switches or GPUs are one candidate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count, islice, product
from typing import TypeVar

from zorse_megatron.costs.topology import MeasuredNode, Topology, numbered
from zorse_megatron.planner.groupings.graph_cuts import split_groupings
from zorse_megatron.planner.groupings.pools import (
    Grouping,
    Merger,
    Pool,
    mergers_of,
    normalised,
    pools_of,
    spread,
)
from zorse_megatron.planner.groupings.symmetry import Symmetry

# Combinations of (parts of each pool) that are listed for one way of merging the pools.
_MOST_COMBINATIONS = 4096
_EVERY_TURN_BELOW = 8  # groups; with 8 to 15 every second turn, with 16 to 23 every fifth, ...
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class GroupingProposal:
    """A grouping, and which family it is of."""

    grouping: Grouping
    origin: str


def propose_groupings(
    spec: Topology,
    *,
    max_groups: int | None = None,
    limit: int = 1000,
    speeds: Mapping[str, float] | None = None,
) -> Iterator[GroupingProposal]:
    """Yield up to `limit` different candidates with at most `max_groups` groups each.

    `max_groups` is usually the number of layers; without it, the number of GPUs, at most 64.
    `speeds`: relative speed by GPU kind; among divisions of the pools into equally many groups,
    those with groups of like speed come first. The order depends on the arguments only.
    """
    most = min(max_groups or min(64, spec.num_gpus), spec.num_gpus)
    whole = GroupingProposal(grouping=normalised([range(spec.num_gpus)]), origin="together")
    families = [
        (1, iter([whole])),
        (1, _by(spec)),
        (1, _divided_pools(spec, most, speeds or {})),
        # Once all nodes are apart, SPLIT only peels off GPUs.
        (3, _split(spec, most)),
    ]
    small = (each for each in _at_periods(families) if len(each.grouping) <= most)
    yield from islice(_distinct(small, Symmetry(spec), set()), limit)


def _distinct(
    found: Iterable[GroupingProposal], symmetry: Symmetry, seen: set[int]
) -> Iterator[GroupingProposal]:
    """`seen`: signatures of what is left out."""
    for proposal in found:
        signature = symmetry.signature(proposal.grouping)
        if signature not in seen:
            seen.add(signature)
            yield proposal


def _at_periods(sources: Sequence[tuple[int, Iterator[_Item]]]) -> Iterator[_Item]:
    """One item in turn of each source whose turn it is: a period of 2 is every second turn."""
    waiting = list(sources)
    for turn in count():
        if not waiting:
            return
        for period, source in list(waiting):
            if turn % period == 0:
                try:
                    yield next(source)
                except StopIteration:
                    waiting.remove((period, source))


def _split(spec: Topology, most: int) -> Iterator[GroupingProposal]:
    for step in split_groupings(spec, most):
        yield GroupingProposal(grouping=step.grouping, origin="split")


def _by(spec: Topology) -> Iterator[GroupingProposal]:
    """One group for each value of some property of a GPU."""
    properties: dict[str, Callable[[int, MeasuredNode, int], object]] = {
        "kind": lambda index, node, local: node.gpu_kinds[local],
        "region": lambda index, node, local: node.region,
        "switch": lambda index, node, local: (node.region, node.switch),
        "node": lambda index, node, local: index,
        "node and kind": lambda index, node, local: (index, node.gpu_kinds[local]),
        "GPU": lambda index, node, local: (index, local),
    }
    for name, value in properties.items():
        groups: dict[object, list[int]] = {}
        for index, node in enumerate(spec.nodes):
            for local, rank in enumerate(spec.ranks_of(index)):
                groups.setdefault(value(index, node, local), []).append(rank)
        yield GroupingProposal(grouping=normalised(groups.values()), origin=f"by {name}")


def _divided_pools(
    spec: Topology, most: int, speeds: Mapping[str, float]
) -> Iterator[GroupingProposal]:
    """Divisions of pools, merged or not, with few groups and with many in turn."""
    by_number = []
    for num_groups, by_merger in sorted(_combinations(pools_of(spec), most, speeds).items()):
        sources = [
            # Unmerged pools most often: there are many mergers and few are of use.
            (1 + 3 * num_merged, iter(sorted(found, key=lambda each: each[:2])))
            for (num_merged, _), found in by_merger.items()
        ]
        by_number.append((1 + (num_groups // _EVERY_TURN_BELOW) ** 2, _at_periods(sources)))
    for _, parts, merger in _at_periods(by_number):
        groups = [
            group
            for pools, number in zip(merger, parts, strict=True)
            for group in _shares(pools, number)
        ]
        yield GroupingProposal(grouping=normalised(groups), origin="pools")


_Rows = list[tuple[float, tuple[int, ...], Merger]]


def _combinations(
    pools: tuple[Pool, ...], most: int, speeds: Mapping[str, float]
) -> dict[int, dict[tuple[int, int], _Rows]]:
    """By number of groups and by merger (pools merged, its number): unevenness, parts, merger.

    O(_MOST_COMBINATIONS) for each merger.
    """
    rows: dict[int, dict[tuple[int, int], _Rows]] = {}
    for number, merger in enumerate(mergers_of(pools)):
        for parts in _parts(merger, most):
            row = (_unevenness(merger, parts, speeds), parts, merger)
            key = (len(pools) - len(merger), number)
            rows.setdefault(sum(parts), {}).setdefault(key, []).append(row)
    return rows


def _parts(merger: Merger, most: int) -> Iterator[tuple[int, ...]]:
    """Numbers of groups for each part of a merger, `most` in total."""
    spare = most - len(merger) + 1
    choices = [_choices(pools, spare) for pools in merger]
    # Few choices each where there are many pools, so that all combinations can be listed.
    each = max(2, int(_MOST_COMBINATIONS ** (1 / len(merger))))
    thinned = [_thinned(numbers, each) for numbers in choices]
    some = islice(product(*thinned), _MOST_COMBINATIONS)
    return (parts for parts in some if sum(parts) <= most)


def _choices(pools: tuple[Pool, ...], most: int) -> list[int]:
    if most < 1:
        return []
    if len(pools) == 1:
        return pools[0].numbers_of_parts(most)
    return spread(min(most, *(pool.num_gpus for pool in pools)))


def _thinned(numbers: list[int], most: int) -> list[int]:
    """The first, the last, and some between at equal distances in the list."""
    if len(numbers) <= most:
        return numbers
    last = len(numbers) - 1
    return [numbers[round(i * last / (most - 1))] for i in range(most)]


def _shares(pools: tuple[Pool, ...], parts: int) -> list[list[int]]:
    """Groups with a share of every pool. Larger shares of one meet smaller ones of the next."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    for number, pool in enumerate(pools):
        shares = pool.divided(parts)
        for group, share in zip(groups, shares[:: -1 if number % 2 else 1], strict=True):
            group.extend(share)
    return groups


def _unevenness(merger: Merger, parts: tuple[int, ...], speeds: Mapping[str, float]) -> float:
    """Mean speed of the fastest pool's groups over that of the slowest pool's."""
    means = [
        sum(pool.num_gpus * speeds.get(pool.kind, 1.0) for pool in pools) / number
        for pools, number in zip(merger, parts, strict=True)
    ]
    return max(means) / min(means)


# Groupings near a given one, for local search.


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


def _all(spec: Topology, grouping: Grouping) -> Iterator[GroupingProposal]:
    classes = _classes(spec, grouping)
    yield from _merges(grouping, classes)
    yield from _splits(spec, grouping, classes)
    yield from _moves(spec, grouping, classes)


def _classes(spec: Topology, grouping: Grouping) -> list[int]:
    """Equal numbers for groups that are alike by themselves, to skip most mirror images early."""
    looks = []
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
        looks.append(tuple(sorted(places)))
    return numbered(looks)


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
    for number in sorted({1, len(order) // 2, len(order) - 1}):
        chosen = set(order[:number])
        yield [rank for rank in group if nodes[rank] in chosen]
    for number in sorted({1, len(group) // 2}):
        yield list(group[:number])


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
