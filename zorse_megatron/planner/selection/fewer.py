"""Selections of GPUs that differ from another one by what they leave out."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import networkx as nx

from zorse_megatron.planner.inputs.search_inputs import Inputs

Selection = tuple[int, ...]
"""Ranks of the whole cluster, ascending."""


def fewer(inputs: Inputs, selection: Selection) -> Iterator[Selection]:
    """Yield selections with a node, half of some alike nodes, a kind or a region less.

    Of alike nodes the last goes first, and of a node with one kind its last GPUs, so that local
    ranks stay what they are. Each selection once; none is empty, or in regions that no links join
    without those that are left out.
    """
    seen = {selection, ()}
    for without in _parts_to_leave_out(inputs, selection):
        left = tuple(rank for rank in selection if rank not in without)
        if left not in seen:
            seen.add(left)
            if _is_joined(inputs, left):
                yield left


def _parts_to_leave_out(inputs: Inputs, selection: Selection) -> Iterator[frozenset[int]]:
    nodes = _nodes(inputs, selection)
    regions = [inputs.spec.nodes[node].region for node, _ in nodes]
    for region in dict.fromkeys(regions):
        yield _ranks(ranks for (_, ranks), its in zip(nodes, regions, strict=True) if its == region)
    for kind in dict.fromkeys(inputs.kinds[rank] for rank in selection):
        yield _ranks(ranks for _, ranks in nodes if {inputs.kinds[r] for r in ranks} == {kind})
    for alike in _alike(inputs, nodes):
        for count in dict.fromkeys((1, len(alike) // 2)):
            if count:
                yield _ranks(alike[-count:])
        last = alike[-1]
        if len({inputs.kinds[rank] for rank in last}) == 1:
            for count in dict.fromkeys((1, len(last) // 2)):
                if count:
                    yield frozenset(last[-count:])


def _is_joined(inputs: Inputs, selection: Selection) -> bool:
    regions = {inputs.spec.nodes[inputs.spec.node_of(rank)].region for rank in selection}
    graph = nx.Graph(
        link.regions for link in inputs.spec.region_links if regions.issuperset(link.regions)
    )
    graph.add_nodes_from(regions)
    return bool(nx.is_connected(graph))


def _nodes(inputs: Inputs, selection: Selection) -> list[tuple[int, Selection]]:
    return [(node, tuple(ranks)) for node, ranks in groupby(selection, key=inputs.spec.node_of)]


def _alike(inputs: Inputs, nodes: Sequence[tuple[int, Selection]]) -> list[list[Selection]]:
    """Nodes with the same selected GPUs and the same links, in order."""
    classes: dict[object, list[Selection]] = {}
    for number, ranks in nodes:
        node = inputs.spec.nodes[number]
        key = (
            tuple(inputs.kinds[rank] for rank in ranks),
            *(node.link, node.nics, node.host_link_bytes_per_s, node.host_memory_bytes),
            *(node.region, node.switch),
        )
        classes.setdefault(key, []).append(ranks)
    return list(classes.values())


def _ranks(parts: Iterator[Selection] | Sequence[Selection]) -> frozenset[int]:
    return frozenset(rank for part in parts for rank in part)
