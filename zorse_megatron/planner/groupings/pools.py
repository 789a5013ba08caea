"""Pools of like GPUs: ways to put them together, and to divide them along the edges of nodes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, TypeVar

from zorse_megatron.costs.topology import MeasuredNode, Topology

# Up to this many parts every number is tried; beyond, numbers a third to a half apart.
_EVERY_NUMBER_UP_TO = 8
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """GPUs of one kind, in nodes that are alike, in one region."""

    kind: str
    region: str
    by_node: tuple[tuple[int, ...], ...]
    """The ranks on each node; nodes on one switch come next to one another."""

    @property
    def num_gpus(self) -> int:
        """GPUs on all nodes together."""
        return sum(map(len, self.by_node))

    def divided(self, parts: int) -> tuple[tuple[int, ...], ...]:
        """Cut into `parts` of as equal size as the nodes allow.

        Up to one part per node: whole nodes. Beyond: every node in equally many parts, if
        `parts` is a multiple of the nodes, or else equal runs of ranks across the nodes' edges.
        """
        if parts <= len(self.by_node):
            runs = _runs(self.by_node, parts)
            return tuple(tuple(rank for node_ranks in run for rank in node_ranks) for run in runs)
        per_node, rest = divmod(parts, len(self.by_node))
        if rest == 0 and per_node <= len(self.by_node[0]):
            return tuple(run for node_ranks in self.by_node for run in _runs(node_ranks, per_node))
        return tuple(_runs([rank for node_ranks in self.by_node for rank in node_ranks], parts))

    def numbers_of_parts(self, most: int) -> list[int]:
        """Numbers of parts along the edges of nodes, ascending, not all of them if many."""
        nodes, per_node = len(self.by_node), len(self.by_node[0])
        whole_nodes = {n for n in spread(nodes) if n <= most}
        inside = {nodes * n for n in range(2, per_node + 1) if nodes * n <= most}
        return sorted(whole_nodes | inside)


def spread(highest: int) -> list[int]:
    """All small numbers, and larger ones ever further apart, up to `highest`.

    >>> spread(40)
    [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40]
    """
    numbers = list(range(1, min(highest, _EVERY_NUMBER_UP_TO) + 1))
    while numbers[-1] < highest:
        last = numbers[-1]
        is_power = last & (last - 1) == 0
        numbers.append(min(highest, last * 3 // 2 if is_power else last * 4 // 3))
    return numbers


def _runs(items: Sequence[_Item], parts: int) -> list[tuple[_Item, ...]]:
    """Consecutive runs whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(len(items), parts)
    runs, start = [], 0
    for number in range(parts):
        stop = start + length + (number < longer)
        runs.append(tuple(items[start:stop]))
        start = stop
    return runs


def pools_of(spec: Topology) -> tuple[Pool, ...]:
    """All pools, by their first rank. O(GPUs)."""
    by_node: dict[tuple[object, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    order = {switch.name: number for number, switch in enumerate(spec.switches)}
    for index, node in enumerate(spec.nodes):
        chain = tuple(order[switch.name] for switch in reversed(spec.switches_above(node.switch)))
        for kind in dict.fromkeys(node.gpu_kinds):
            pairs = zip(spec.ranks_of(index), node.gpu_kinds, strict=True)
            ranks = tuple(rank for rank, its_kind in pairs if its_kind == kind)
            key = (node.region, kind, hardware_key(node))
            by_node.setdefault(key, []).append((chain, ranks))
    return tuple(
        Pool(
            kind=str(key[1]), region=str(key[0]), by_node=tuple(ranks for _, ranks in sorted(found))
        )
        for key, found in by_node.items()
    )


# Which pools of GPUs share groups: ways to put pools together.


Merger = tuple[tuple[Pool, ...], ...]
"""Pools that share groups; each pool is in one part."""

# Up to this many pools every way is tried (Bell's number: 203 for 6).
_ALL_WAYS_UP_TO = 6


def mergers_of(pools: Sequence[Pool]) -> tuple[Merger, ...]:
    """Ways to merge pools, those with few mergers first.

    All of them for up to 6 pools. Beyond: none, all, by kind, by region, and every two.
    """
    if len(pools) <= _ALL_WAYS_UP_TO:
        found = list(set_partitions(tuple(pools)))
    else:
        found = [tuple((pool,) for pool in pools), (tuple(pools),)]
        found += [_by(pools, "kind"), _by(pools, "region")]
        found += [
            (*((pool,) for pool in pools if pool not in pair), pair)
            for pair in combinations(pools, 2)
        ]
    return tuple(sorted(dict.fromkeys(found), key=lambda merger: -len(merger)))


def _by(pools: Sequence[Pool], field: str) -> Merger:
    together: dict[str, list[Pool]] = {}
    for pool in pools:
        together.setdefault(getattr(pool, field), []).append(pool)
    return tuple(map(tuple, together.values()))


# All ways to part some items into sets, where there are few.


Item = TypeVar("Item")


def set_partitions(items: tuple[Item, ...]) -> Iterator[tuple[tuple[Item, ...], ...]]:
    """Each partition once: Bell's number of them, 203 for 6 items."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        yield ((first,), *partition)
        for i, part in enumerate(partition):
            yield (*partition[:i], (first, *part), *partition[i + 1 :])


# A grouping: which ranks form a group.


Grouping = tuple[tuple[int, ...], ...]
"""The ranks of each group, ascending; groups by their first rank. Every rank is in one group."""

_NAMED = frozenset({"name", "first_rank", "host_memory_bytes", "region", "switch"})


def normalised(groups: Iterable[Iterable[int]]) -> Grouping:
    """Sort ranks and groups, and drop empty groups.

    >>> normalised([[5, 4], [], [0, 2]])
    ((0, 2), (4, 5))
    """
    return tuple(sorted(tuple(sorted(group)) for group in groups if group))


def hardware_key(node: MeasuredNode) -> tuple[Any, ...]:
    """Equal for nodes that differ in name, place and host memory only."""
    # Of fields alone: what a node has worked out and keeps does not tell it from another.
    return tuple(getattr(node, each.name) for each in fields(node) if each.name not in _NAMED)
