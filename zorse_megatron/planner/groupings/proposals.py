"""Which ranks might hold the same layers: groupings for the planner's search.

Families, taken in turn so that a cap leaves some of each:

- `together`: one group of all;
- `split`: SPLIT's k-cuts of the topology graph, k = 2, 3, ...;
- `by`: one group per GPU kind, region, switch, node, pool (like GPUs of a region), GPU;
- `pools`: each pool divided along its nodes into q groups, every q for every pool, pools merged or
  not. Merged pools give groups with a share of each.

Groupings that differ by a swap of identical nodes, switches or GPUs are one candidate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from typing import TypeVar

from zorse_megatron.costs.topology import MeasuredNode, Topology
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
    symmetry, seen = Symmetry(spec), set[int]()
    whole = GroupingProposal(grouping=normalised([range(spec.num_gpus)]), origin="together")
    families = [
        (1, iter([whole])),
        (1, _by(spec)),
        (1, _divided_pools(spec, most, speeds or {})),
        # Once all nodes are apart, SPLIT only peels off GPUs.
        (3, _split(spec, most)),
    ]
    fresh = (each for each in _at_periods(families) if len(each.grouping) <= most)
    yield from islice((each for each in fresh if _is_new(each, symmetry, seen)), limit)


def _is_new(proposal: GroupingProposal, symmetry: Symmetry, seen: set[int]) -> bool:
    signature = symmetry.signature(proposal.grouping)
    if signature in seen:
        return False
    seen.add(signature)
    return True


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
    combinations = islice(product(*thinned), _MOST_COMBINATIONS)
    return (parts for parts in combinations if sum(parts) <= most)


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
