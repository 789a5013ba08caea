"""Device orders, and their best contiguous partition into groups.

Good pipelines over many nodes have groups of GPUs that are near one another, in an order that
crosses slow links once, with whole numbers of layers and equal times. Groups along the edges of
nodes rarely balance, because a layer is a large unit; groups cut out of a line balance to a GPU.

For a line the best cut is found exactly, by dynamic programming over (position, layers so far), for
prices of pieces in closed form (see `line_prices`). Like the layers of a fixed grouping (`layers`),
max(busy) + sum(passage) is minimised: for a ceiling on busy the least sum, for a few ceilings from
the least possible one up. What is in flight in a piece depends on the GPUs behind it, and in a line
those are known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from zorse_megatron.planner.closed_form.segment_costs import LinePrices
from zorse_megatron.planner.groupings.pools import Pool, pools_of
from zorse_megatron.planner.inputs.search_inputs import Inputs

# About so many pieces of equal GPUs of one node, or of several nodes, make a line.
FINE, COARSE = 40, 20
_EVERY_ORDER_UP_TO = 4  # pools; 4! = 24
# Ceilings on the busiest group that are tried, over the least possible one.
_SLACK = (1.0, 1.015, 1.03, 1.05, 1.08, 1.12)
_BISECTIONS = 12


Line = tuple[tuple[int, ...], ...]
"""Units: ranks of GPUs that stay together, all of one kind."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Groups in model order with their layers."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each, ascending."""
    layers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    """Micro-batch size of each cell of each group's team."""
    value_s: float
    """max(busy) + sum(passage), by the prices of the line."""


def lines(inputs: Inputs, *, most_units: int, halved: bool) -> list[Line]:
    """Lines worth cutting: units of equal GPUs of a pool in turn, pools in various orders.

    Every order of pools that keeps regions together, where pools are few; else by rank and by
    memory, both ways. The n-th line has the same order for any `most_units`. `halved`: cut nodes
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
    memory = {pool: -inputs.capacities_bytes[pool.cells[0][0]] for pool in pools}
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
    nodes = len(pool.cells)
    if wanted < nodes:
        size = -(-nodes // wanted)
        blocks = [pool.cells[at : at + size] for at in range(0, nodes, size)]
        return [tuple(rank for cell in block for rank in cell) for block in blocks]
    parts = -(-wanted // nodes)
    if halved:
        parts = max(n for n in range(1, parts + 1) if len(pool.cells[0]) % n == 0)
    return [run for cell in pool.cells for run in _cut_evenly(cell, min(parts, len(cell)))]


def _cut_evenly(cell: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    bounds = [len(cell) * part // parts for part in range(parts + 1)]
    return [cell[a:b] for a, b in pairwise(bounds)]


def best_cuts(prices: LinePrices, *, most_groups: int) -> list[Cut]:
    """The best cut for each of some ceilings, best first; empty where nothing fits."""
    low, high = 0.0, prices.highest_s
    if not np.isfinite(high) or not _covers(prices, high):
        return []
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _covers(prices, middle):
            high = middle
        else:
            low = middle
    found: dict[tuple[int, ...], Cut] = {}
    for cut in _least_passages(prices, [high * slack for slack in _SLACK]):
        if cut is not None and len(cut.groups) <= most_groups:
            found.setdefault(tuple(len(group) for group in cut.groups) + cut.layers, cut)
    return sorted(found.values(), key=lambda cut: cut.value_s)


def _covers(prices: LinePrices, ceiling_s: float) -> bool:
    """Whether all layers find a place; O(units^2)."""
    most = prices.most_layers(ceiling_s)
    covered = np.full(prices.num_units + 1, -np.inf)
    covered[0] = 0
    for stop in range(1, prices.num_units + 1):
        held = most[:stop, stop]
        covered[stop] = np.max(np.where(held > 0, covered[:stop] + held, -np.inf))
    return bool(covered[-1] >= prices.num_layers)


def _least_passages(prices: LinePrices, ceilings_s: Sequence[float]) -> Iterator[Cut | None]:
    """For each ceiling pieces and layers with the least sum of passages, none busier than that.

    A piece takes as many layers as the ceiling allows, or one less; where nothing comes of that,
    any number. None where no pieces hold all layers.
    """
    found = _cuts(prices, ceilings_s, most_fewer=1)
    for ceiling_s, cut in zip(ceilings_s, found, strict=True):
        yield cut or next(_cuts(prices, [ceiling_s], most_fewer=prices.num_layers - 1))


def _cuts(
    prices: LinePrices, ceilings_s: Sequence[float], *, most_fewer: int
) -> Iterator[Cut | None]:
    """The same, with pieces of up to so many layers fewer. Each O(units^2 * layers * most_fewer).

    Arrays: [ceiling, start, layers], for all ceilings at once.
    """
    count, total = prices.num_units, prices.num_layers
    most = np.stack([prices.most_layers(ceiling_s) for ceiling_s in ceilings_s])
    each = np.arange(len(most))[:, None]
    sums = np.full((len(most), count + 1, total + 1), np.inf)
    sums[:, 0, 0] = 0.0
    came_from = np.zeros((len(most), count + 1, total + 1, 2), dtype=int)
    layers = np.arange(total + 1)
    for stop in range(1, count + 1):
        starts = np.flatnonzero(most[:, :stop, stop].any(axis=0))
        if not starts.size:
            continue
        fewer = np.repeat(np.arange(most_fewer + 1), len(starts))
        starts = np.tile(starts, most_fewer + 1)
        held = np.maximum(0, most[:, starts, stop] - fewer)
        before = layers - held[..., None]
        possible = (held > 0)[..., None] & (before >= 0)
        sums_before = sums[each[..., None], starts[:, None], np.maximum(before, 0)]
        exposed = prices.tails.exposed_s(starts, stop, held, sums_before)
        passages = prices.passage_s[starts, stop, held][..., None]
        reached = np.where(possible, sums_before + passages + exposed, np.inf)
        best = np.argmin(reached, axis=1)
        sums[:, stop] = np.take_along_axis(reached, best[:, None], axis=1)[:, 0]
        came_from[:, stop, :, 0] = starts[best]
        came_from[:, stop, :, 1] = np.take_along_axis(held, best, axis=1)
    for reached, origins in zip(sums, came_from, strict=True):
        yield _traced_back(prices, origins) if np.isfinite(reached[count, total]) else None


def _traced_back(prices: LinePrices, came_from: np.ndarray) -> Cut:
    stop, left = prices.num_units, prices.num_layers
    pieces: list[tuple[int, int, int]] = []
    while stop:
        start, held = (int(each) for each in came_from[stop, left])
        pieces.append((start, stop, held))
        stop, left = start, left - held
    pieces.reverse()
    busy_s = max(float(prices.busy_s[piece]) for piece in pieces)
    passage_s = sum(float(prices.passage_s[piece]) for piece in pieces)
    groups = tuple(
        tuple(sorted(rank for unit in prices.units[start:stop] for rank in unit))
        for start, stop, _ in pieces
    )
    return Cut(
        groups=groups,
        sizes=tuple(map(prices.sizes_of, groups)),
        layers=tuple(held for _, _, held in pieces),
        value_s=busy_s + passage_s,
    )
