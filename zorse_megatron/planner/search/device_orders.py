"""Device orders: sequences of all GPUs that are worth partitioning into groups."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

from zorse_megatron.planner.groupings.pools import Pool, pools_of
from zorse_megatron.planner.inputs.search_inputs import Inputs

# About this many units of equal GPUs of one node, or of several nodes, make a device order.
FINE, COARSE = 40, 20
_EVERY_ORDER_UP_TO = 4  # pools; 4! = 24

DeviceOrder = tuple[tuple[int, ...], ...]
"""Units: ranks of GPUs that stay together, all of one kind."""


def device_orders(inputs: Inputs, *, most_units: int, halved: bool) -> list[DeviceOrder]:
    """Device orders worth partitioning: units of equal GPUs of a pool in turn, pools in any order.

    Every order of pools that keeps regions together, where pools are few; else by rank and by
    memory, both ways. The n-th one has the same order for any `most_units`. `halved`: cut nodes
    into equal parts only.
    """
    pools = pools_of(inputs.spec)
    units = {pool: _units(pool, inputs.world_size, most_units, halved=halved) for pool in pools}
    orders = dict.fromkeys(_orders(inputs, pools))
    return [tuple(unit for pool in order for unit in units[pool]) for order in orders]


def _orders(inputs: Inputs, pools: tuple[Pool, ...]) -> Iterator[tuple[Pool, ...]]:
    if len(pools) <= _EVERY_ORDER_UP_TO:
        yield from (order for order in permutations(pools) if _keeps_regions(order))
        return
    regions = list(dict.fromkeys(pool.region for pool in pools))
    memory = {pool: -inputs.capacities_bytes[pool.by_node[0][0]] for pool in pools}
    for ranked in (list(pools), sorted(pools, key=memory.__getitem__)):
        for each in (ranked, ranked[::-1]):
            for way in (regions, regions[::-1]):
                yield tuple(sorted(each, key=lambda pool: way.index(pool.region)))


def _keeps_regions(order: Sequence[Pool]) -> bool:
    regions = [pool.region for pool in order]
    changes = sum(a != b for a, b in pairwise(regions))
    return changes == len(set(regions)) - 1


def _units(pool: Pool, world_size: int, most_units: int, *, halved: bool) -> list[tuple[int, ...]]:
    """Parts of nodes, or several nodes, about as many as the pool's part of the cluster."""
    wanted = max(1, round(most_units * pool.num_gpus / world_size))
    nodes = len(pool.by_node)
    if wanted < nodes:
        size = -(-nodes // wanted)
        blocks = [pool.by_node[at : at + size] for at in range(0, nodes, size)]
        return [tuple(rank for node_ranks in block for rank in node_ranks) for block in blocks]
    parts = -(-wanted // nodes)
    if halved:
        parts = max(n for n in range(1, parts + 1) if len(pool.by_node[0]) % n == 0)
    return [
        run
        for node_ranks in pool.by_node
        for run in _split_evenly(node_ranks, min(parts, len(node_ranks)))
    ]


def _split_evenly(node_ranks: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    bounds = [len(node_ranks) * part // parts for part in range(parts + 1)]
    return [node_ranks[a:b] for a, b in pairwise(bounds)]
