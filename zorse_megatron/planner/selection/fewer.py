"""Selections of GPUs that differ from another one by what they leave out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

import networkx as nx

from zorse_megatron.planner.inputs.search_inputs import Inputs

Selection = tuple[int, ...]
"""Ranks of the whole cluster, ascending."""
_EVERY_SUBSET_UP_TO = 4  # classes of alike nodes


@dataclass(frozen=True, kw_only=True)
class Fewer:
    """A smaller selection."""

    ranks: Selection
    of_nodes: bool
    """Whether its nodes have all the GPUs that they had; else one has fewer."""
    slow_links: bool
    """Whether what is left out is, or leaves, a region or nodes with slower adapters."""


def fewer(inputs: Inputs, selection: Selection) -> Iterator[Fewer]:
    """Yield selections with a region, a kind, some nodes or some of a node's GPUs less.

    Of alike nodes the last go first, and of a node its last GPUs, so that local ranks stay what
    they are. Each selection once, those of whole nodes first; none is empty, or in regions that no
    links join without those that are left out.
    """
    nodes = [tuple(ranks) for _, ranks in groupby(selection, key=inputs.spec.node_of)]
    alike = _alike(inputs, nodes)
    seen: set[Selection] = {selection, ()}
    for of_nodes, slow_links, ways in (
        (True, True, _far_nodes(inputs, nodes)),
        (True, False, _whole_nodes(inputs, nodes, alike)),
        (False, False, _parts_of_nodes(inputs, alike)),
    ):
        for without in ways:
            left = tuple(rank for rank in selection if rank not in without)
            if left not in seen:
                seen.add(left)
                if _is_joined(inputs, left):
                    yield Fewer(ranks=left, of_nodes=of_nodes, slow_links=slow_links)


def _far_nodes(inputs: Inputs, nodes: Sequence[Selection]) -> Iterator[frozenset[int]]:
    """What to leave out: a region, or all but it; a kind, where nodes are mixed and have it last;
    the nodes with the slowest adapters."""
    by_region: dict[str, list[Selection]] = {}
    by_rate: dict[float, list[Selection]] = {}
    for ranks in nodes:
        by_region.setdefault(_region(inputs, ranks), []).append(ranks)
        rate = inputs.spec.nodes[inputs.spec.node_of(ranks[0])].nics_bytes_per_s
        by_rate.setdefault(rate, []).append(ranks)
    for each in by_region.values():
        yield _ranks(each)
        yield _ranks(nodes) - _ranks(each)
    for kind in dict.fromkeys(inputs.kinds[ranks[-1]] for ranks in nodes):
        tails = [_tail(inputs, ranks, kind) for ranks in nodes]
        of_kind = sum(inputs.kinds[rank] == kind for ranks in nodes for rank in ranks)
        is_mixed = any(0 < len(tail) < len(ranks) for tail, ranks in zip(tails, nodes, strict=True))
        if is_mixed and sum(map(len, tails)) == of_kind:
            yield _ranks(tails)
    if len(by_rate) > 1:
        yield _ranks(by_rate[min(by_rate)])


def _tail(inputs: Inputs, ranks: Selection, kind: str) -> Selection:
    """The last GPUs of a node, as far as they are of the kind."""
    count = next(
        (at for at, rank in enumerate(reversed(ranks)) if inputs.kinds[rank] != kind), len(ranks)
    )
    return ranks[len(ranks) - count :]


def _whole_nodes(
    inputs: Inputs, nodes: Sequence[Selection], alike: Sequence[Sequence[Selection]]
) -> Iterator[frozenset[int]]:
    """What to leave out: a kind, or all but it; classes of nodes, or some of a class."""
    some: dict[str, list[Selection]] = {}
    for ranks in nodes:
        if len(kinds := {inputs.kinds[rank] for rank in ranks}) == 1:
            some.setdefault(kinds.pop(), []).append(ranks)
    for each in some.values():
        yield _ranks(each)
        yield _ranks(nodes) - _ranks(each)
    for count in range(1, len(alike) if len(alike) <= _EVERY_SUBSET_UP_TO else 2):
        for classes in combinations(alike, count):
            yield _ranks(node for each in classes for node in each)
    for same in alike:
        every = range(1, len(same))
        for count in every if len(same) <= _EVERY_SUBSET_UP_TO else (1, len(same) // 2):
            yield _ranks(same[-count:])


def _parts_of_nodes(
    inputs: Inputs, alike: Sequence[Sequence[Selection]]
) -> Iterator[frozenset[int]]:
    """The last GPU of a node, half of them, or those of the kind that comes last."""
    for same in alike:
        last = same[-1]
        of_kind = len(_tail(inputs, last, inputs.kinds[last[-1]]))
        for count in dict.fromkeys((of_kind, len(last) // 2, 1)):
            if 0 < count < len(last):
                yield frozenset(last[-count:])


def _is_joined(inputs: Inputs, selection: Selection) -> bool:
    regions = {inputs.spec.nodes[inputs.spec.node_of(rank)].region for rank in selection}
    graph = nx.Graph(
        link.regions for link in inputs.spec.region_links if regions.issuperset(link.regions)
    )
    graph.add_nodes_from(regions)
    return bool(nx.is_connected(graph))


def _region(inputs: Inputs, ranks: Selection) -> str:
    return inputs.spec.nodes[inputs.spec.node_of(ranks[0])].region


def _alike(inputs: Inputs, nodes: Sequence[Selection]) -> list[list[Selection]]:
    """Nodes with the same selected GPUs and the same links, in order."""
    classes: dict[object, list[Selection]] = {}
    for ranks in nodes:
        node = inputs.spec.nodes[inputs.spec.node_of(ranks[0])]
        key = (
            tuple(inputs.kinds[rank] for rank in ranks),
            *(node.link, node.nics, node.host_link_bytes_per_s, node.host_memory_bytes),
            *(node.region, node.switch),
        )
        classes.setdefault(key, []).append(ranks)
    return list(classes.values())


def _ranks(parts: Iterable[Selection]) -> frozenset[int]:
    return frozenset(rank for part in parts for rank in part)
