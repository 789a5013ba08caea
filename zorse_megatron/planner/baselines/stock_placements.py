"""Which GPUs stock trains on, and in which order its ranks are on them.

torchrun numbers ranks node by node, so nodes may be in any order (`--node-rank`), the GPUs of a
node among themselves (`CUDA_VISIBLE_DEVICES`), and any of them may be left out.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zorse_megatron.planner.baselines.lower_bound import best_layers_per_s
from zorse_megatron.planner.inputs.other_gpus import NodeLike, on_nodes
from zorse_megatron.planner.inputs.search_inputs import Inputs

_MOST_SETS_OF_FEW = 100
"""Up to so many sets of GPUs, alike ones counted once, all are tried."""
_MOST_KINDS = 5  # beyond, only the fastest ones together
_MOST_ORDERS_OF_FEW = 48
_MOST_GPUS_IN_ALL_ORDERS = 6  # of a node
_MOST_SWAPPED = 16  # nodes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """GPUs in the order of stock's ranks."""

    nodes: tuple[tuple[int, ...], ...]
    """Ranks of the cluster, node by node."""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of stock's job -> rank of the cluster."""
        return tuple(itertools.chain.from_iterable(self.nodes))

    def inputs(self, base: Inputs) -> Inputs:
        """With these GPUs alone, in this order."""
        if self.ranks == tuple(range(base.world_size)):
            return base
        return on_nodes(
            base,
            [NodeLike(node=base.spec.node_of(ranks[0]), ranks=ranks) for ranks in self.nodes],
        )

    def look(self, base: Inputs) -> tuple[object, ...]:
        """Equal for placements that take the same."""
        return tuple(
            (_look_of_node(base, ranks), tuple(base.kinds[rank] for rank in ranks))
            for ranks in self.nodes
        )


def in_order(base: Inputs, ranks: tuple[int, ...]) -> Placement:
    """As the cluster file has them."""
    return Placement(nodes=tuple(_by_node(base, ranks)))


def placements(base: Inputs, ranks: tuple[int, ...]) -> list[Placement]:
    """Orders of these GPUs that are worth trying: all of few nodes; else by speed or memory.

    Nodes of a site stay together.
    """
    nodes = list(_by_node(base, ranks))
    speeds = {kind: best_layers_per_s(base, kind) for kind in set(base.kinds)}

    def speed(rank: int) -> float:
        return speeds[base.kinds[rank]]

    def memory(rank: int) -> float:
        return base.capacities_bytes[rank]

    found = [Placement(nodes=tuple(nodes))]
    for key in (speed, memory):
        for upwards in (True, False):
            found.append(_sorted(base, nodes, key, upwards=upwards))
            found.append(_with_last(base, found[-1], speed))
    found.append(Placement(nodes=tuple(reversed(nodes))))
    inside = [tuple(dict.fromkeys(_orders_inside(base, each))) for each in nodes]
    number = math.factorial(len(nodes)) * math.prod(map(len, inside))
    if number <= _MOST_ORDERS_OF_FEW:
        found += [
            Placement(nodes=tuple(each))
            for some in itertools.product(*inside)
            for each in itertools.permutations(some)
        ]
    seen: dict[tuple[object, ...], Placement] = {}
    for each in found:
        seen.setdefault(each.look(base), each)
    return list(seen.values())


def _orders_inside(base: Inputs, ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Those of a node's GPUs: all of few, else kind by kind."""
    counts = Counter(base.kinds[rank] for rank in ranks)
    number = math.factorial(len(ranks)) // math.prod(map(math.factorial, counts.values()))
    if len(ranks) > _MOST_GPUS_IN_ALL_ORDERS or number > _MOST_ORDERS_OF_FEW:
        for order in itertools.permutations(counts):
            yield tuple(sorted(ranks, key=lambda rank: (order.index(base.kinds[rank]), rank)))
        return
    words = dict.fromkeys(itertools.permutations(base.kinds[rank] for rank in ranks))
    for word in words:
        waiting = {kind: [rank for rank in ranks if base.kinds[rank] == kind] for kind in counts}
        yield tuple(waiting[kind].pop(0) for kind in word)


def swapped(placement: Placement, base: Inputs) -> Iterator[Placement]:
    """Yield placements with two nodes exchanged, or with one node's GPUs in another order."""
    nodes, seen = placement.nodes, {placement.look(base)}
    if len(nodes) > _MOST_SWAPPED:
        return
    for one, other in itertools.combinations(range(len(nodes)), 2):
        changed = list(nodes)
        changed[one], changed[other] = nodes[other], nodes[one]
        yield from _if_new(Placement(nodes=tuple(changed)), base, seen)
    for at, ranks in enumerate(nodes):
        for order in _orders_inside(base, ranks):
            changed = list(nodes)
            changed[at] = order
            yield from _if_new(Placement(nodes=tuple(changed)), base, seen)


def _if_new(
    placement: Placement, base: Inputs, seen: set[tuple[object, ...]]
) -> Iterator[Placement]:
    if placement.look(base) not in seen:
        seen.add(placement.look(base))
        yield placement


def _sorted(
    base: Inputs,
    nodes: list[tuple[int, ...]],
    key: Callable[[int], float],
    *,
    upwards: bool,
) -> Placement:
    """GPUs in each node, nodes in each site, and sites by their means."""
    way = 1 if upwards else -1

    def mean(ranks: tuple[int, ...]) -> float:
        return way * sum(map(key, ranks)) / len(ranks)

    sites: dict[str | None, list[tuple[int, ...]]] = {}
    for ranks in nodes:
        inner = tuple(sorted(ranks, key=lambda rank: (way * key(rank), rank)))
        sites.setdefault(base.spec.nodes[base.spec.node_of(ranks[0])].region, []).append(inner)
    ordered = sorted(sites.values(), key=lambda some: mean(tuple(itertools.chain(*some))))
    return Placement(nodes=tuple(ranks for some in ordered for ranks in sorted(some, key=mean)))


def _with_last(base: Inputs, placement: Placement, speed: Callable[[int], float]) -> Placement:
    """The fastest node last, for the loss, or first where it is last."""
    nodes = list(placement.nodes)
    fastest = max(range(len(nodes)), key=lambda at: max(map(speed, nodes[at])))
    node = nodes.pop(fastest)
    nodes.insert(0 if fastest == len(nodes) else len(nodes), node)
    return Placement(nodes=tuple(nodes))


def subsets(base: Inputs) -> Iterator[tuple[int, ...]]:
    """Yield sets of GPUs, not all of them, each once.

    Every one of few; else some kinds, all of them and a power of two, the fastest kinds first; one
    site, all but one; and all but some alike nodes.
    """
    everything = tuple(range(base.world_size))
    seen = {everything}
    for ranks in (*_every_one(base), *_of_some_kinds(base), *_of_nodes(base)):
        if ranks and ranks not in seen:
            seen.add(ranks)
            yield ranks


def _every_one(base: Inputs) -> Iterator[tuple[int, ...]]:
    """If they are few: of each kind in each node the first ones."""
    parts: dict[tuple[int, str], list[int]] = {}
    for rank, kind in enumerate(base.kinds):
        parts.setdefault((base.spec.node_of(rank), kind), []).append(rank)
    if math.prod(len(part) + 1 for part in parts.values()) > _MOST_SETS_OF_FEW:
        return
    looks = set()
    for counts in itertools.product(*(range(len(part) + 1) for part in parts.values())):
        some = [part[:count] for part, count in zip(parts.values(), counts, strict=True)]
        ranks = tuple(sorted(itertools.chain(*some)))
        look = frozenset(Counter(in_order(base, ranks).look(base)).items())
        if look not in looks:
            looks.add(look)
            yield ranks


def _of_some_kinds(base: Inputs) -> Iterator[tuple[int, ...]]:
    kinds = dict.fromkeys(base.kinds)
    fastest = sorted(kinds, key=lambda kind: -best_layers_per_s(base, kind))
    for count in range(1, len(fastest) + 1):
        for some in itertools.combinations(fastest, count):
            if len(fastest) > _MOST_KINDS and some != tuple(fastest[:count]):
                continue
            ranks = tuple(rank for rank, kind in enumerate(base.kinds) if kind in some)
            yield ranks
            yield ranks[: 2 ** (len(ranks).bit_length() - 1)]


def _of_nodes(base: Inputs) -> Iterator[tuple[int, ...]]:
    """One site, all but one; all but the last, or the last half, of alike nodes."""
    nodes = list(_by_node(base, tuple(range(base.world_size))))
    sites: dict[object, list[tuple[int, ...]]] = {}
    alike: dict[object, list[tuple[int, ...]]] = {}
    for ranks in nodes:
        sites.setdefault(base.spec.nodes[base.spec.node_of(ranks[0])].region, []).append(ranks)
        alike.setdefault(Placement(nodes=(ranks,)).look(base), []).append(ranks)
    yield from (_without(nodes, some) for some in sites.values())
    yield from (tuple(itertools.chain(*some)) for some in sites.values())
    for some in alike.values():
        yield from (_without(nodes, some[-count:]) for count in {1, -(-len(some) // 2)})


def _without(nodes: list[tuple[int, ...]], some: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(rank for ranks in nodes if ranks not in some for rank in ranks)


def _by_node(base: Inputs, ranks: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for _, some in itertools.groupby(sorted(ranks), key=base.spec.node_of):
        yield tuple(some)


def _look_of_node(base: Inputs, ranks: tuple[int, ...]) -> tuple[object, ...]:
    node = base.spec.nodes[base.spec.node_of(ranks[0])]
    capacities = tuple(base.capacities_bytes[rank] for rank in ranks)
    return (
        *(node.link, node.nics, node.host_link_bytes_per_s, node.region, node.switch),
        *(node.intra_curves, capacities),
    )
