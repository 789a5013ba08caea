"""Orders of all GPUs, and their best partition into groups."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from zorse_megatron.planner.closed_form.candidate import Candidate, MemoryClass, best_sizes
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts, SegmentTails
from zorse_megatron.planner.groupings.pools import Pool, pools_of
from zorse_megatron.planner.inputs.search_inputs import Inputs

# Device orders: sequences of all GPUs that are worth partitioning into groups.


# About this many units of equal GPUs of one node, or of several nodes, make a device order.
FINE, COARSE = 40, 20
_EVERY_ORDER_UP_TO = 4  # pools; 4! = 24

DeviceOrder = tuple[tuple[int, ...], ...]
"""Units: ranks of GPUs that stay together, all of one kind."""


def device_orders(inputs: Inputs, *, most_units: int, halved: bool) -> list[DeviceOrder]:
    """Device orders worth partitioning: units of equal GPUs of a pool in turn, pools in any order.

    Every order of pools that keeps regions together, where pools are few; else by rank and by
    memory, both ways. The n-th one has the same order for any `most_units`. `halved`: cut nodes
    into even TP shards only.
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


# The best contiguous partition of a device order into groups.
#
# Good pipelines over many nodes have groups of GPUs that are near one another, in an order that
# crosses slow links once, with whole numbers of layers and equal times. Groups along the edges of
# nodes rarely balance, because a layer is a large unit; a contiguous partition balances to a GPU.
#
# For a device order the best partition is found exactly, by dynamic programming over (position,
# layers so far), for costs of segments in closed form (`segment_costs`). Like the layers of a fixed
# grouping (`estimator`), max(busy) + sum(fill/drain) is minimised: for a ceiling on busy the
# least sum, for a few ceilings from the least possible one up. What is in flight in a segment
# depends on the GPUs after it, and in a device order those are known.


# Ceilings on the busiest group that are tried, over the least possible one.
_SLACK = (1.0, 1.015, 1.03, 1.05, 1.08, 1.12)
_BISECTIONS = 12


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Groups in model order with their layers."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each, ascending."""
    layers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    """Micro-batch size of each GPU class of each group."""
    value_s: float
    """max(busy) + sum(fill/drain), by the costs of the device order."""


def best_partitions(costs: SegmentCosts, *, most_groups: int) -> list[Partition]:
    """The best partition for each of some ceilings, best first; empty where nothing fits."""
    low, high = 0.0, costs.highest_s
    if not np.isfinite(high) or not _covers(costs, high):
        return []
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _covers(costs, middle):
            high = middle
        else:
            low = middle
    found: dict[tuple[int, ...], Partition] = {}
    for partition in _least_fill_drain(costs, [high * slack for slack in _SLACK]):
        if partition is not None and len(partition.groups) <= most_groups:
            found.setdefault(
                tuple(len(group) for group in partition.groups) + partition.layers, partition
            )
    return sorted(found.values(), key=lambda partition: partition.value_s)


def _covers(costs: SegmentCosts, ceiling_s: float) -> bool:
    """Whether all layers find a place; O(units^2)."""
    most = costs.most_layers(ceiling_s).T.tolist()  # [stop][start]; there are few units
    covered: list[float] = [0.0]
    for held in most[1:]:
        reached = (before + more for before, more in zip(covered, held, strict=False) if more)
        covered.append(max(reached, default=-math.inf))
    return covered[-1] >= costs.num_layers


def _least_fill_drain(
    costs: SegmentCosts, ceilings_s: Sequence[float]
) -> Iterator[Partition | None]:
    """For each ceiling the segments and layers with the least fill/drain, none busier than that.

    A segment takes as many layers as the ceiling allows, or one less; where nothing comes of that,
    any number. None where no segments hold all layers.
    """
    found = list(_partitions(costs, ceilings_s, most_fewer=1))
    left_s = [at_s for at_s, each in zip(ceilings_s, found, strict=True) if each is None]
    others = _partitions(costs, left_s, most_fewer=costs.num_layers - 1)
    for partition in found:
        yield next(others) if partition is None else partition


def _partitions(
    costs: SegmentCosts, ceilings_s: Sequence[float], *, most_fewer: int
) -> Iterator[Partition | None]:
    """The same, with segments of up to this many layers fewer. Each
    O(units^2 * layers * most_fewer).

    Arrays: [ceiling, start, layers], for all ceilings at once.
    """
    count, total = costs.num_units, costs.num_layers
    most = np.stack([costs.most_layers(ceiling_s) for ceiling_s in ceilings_s])
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
        possible = most[:, starts, stop].max(axis=0) > fewer
        starts, fewer = starts[possible], fewer[possible]
        held = np.maximum(0, most[:, starts, stop] - fewer)
        before = layers - held[..., None]
        possible = (held > 0)[..., None] & (before >= 0)
        sums_before = sums[each[..., None], starts[:, None], np.maximum(before, 0)]
        exposed_s = costs.tails.exposed_s(starts, stop, held, sums_before)
        fill_drain = costs.fill_drain_s[starts, stop, held][..., None]
        reached = np.where(possible, sums_before + fill_drain + exposed_s, np.inf)
        best = np.argmin(reached, axis=1)
        sums[:, stop] = np.take_along_axis(reached, best[:, None], axis=1)[:, 0]
        came_from[:, stop, :, 0] = starts[best]
        came_from[:, stop, :, 1] = np.take_along_axis(held, best, axis=1)
    for reached, origins in zip(sums, came_from, strict=True):
        yield _traced_back(costs, origins) if np.isfinite(reached[count, total]) else None


def _traced_back(costs: SegmentCosts, came_from: np.ndarray) -> Partition:
    stop, left = costs.num_units, costs.num_layers
    segments: list[tuple[int, int, int]] = []
    while stop:
        start, held = (int(each) for each in came_from[stop, left])
        segments.append((start, stop, held))
        stop, left = start, left - held
    segments.reverse()
    busy_s = max(float(costs.busy_s[segment]) for segment in segments)
    fill_drain_s = sum(float(costs.fill_drain_s[segment]) for segment in segments)
    groups = tuple(
        tuple(sorted(rank for unit in costs.units[start:stop] for rank in unit))
        for start, stop, _ in segments
    )
    return Partition(
        groups=groups,
        sizes=tuple(map(costs.sizes_of, groups)),
        layers=tuple(held for _, _, held in segments),
        value_s=busy_s + fill_drain_s,
    )


_FIRST_LEVEL, _OTHER_LEVELS = 2, (1, 3, 4)
_FINE_ORDERS = 6  # that are costed in fine units
_KEPT_ORDERS = 3  # that are costed at all levels
_KEPT_PARTITIONS = 2  # of each device order and choice of sizes
_DESCENTS = 2  # partitions from which the sizes of single classes are changed
_STEPS = 3
_SIZES = (1, 2, 3, 4, 6, 8)

ClassSizes = dict[MemoryClass, int]


@dataclass(frozen=True, kw_only=True)
class _Found:
    device_order: DeviceOrder
    sizes: ClassSizes
    partition: Partition


class DeviceOrderSearch:
    """The best partitions of all device orders: into groups in step (nested), or into any."""

    def __init__(self, estimator: Estimator, *, nested: bool, most_groups: int) -> None:
        """`nested`: see `SegmentCosts`."""
        self.inputs = estimator.inputs
        self.estimator = estimator
        self.nested = nested
        self.most_groups = most_groups
        most = self.inputs.space.max_micro_batch_size or self.inputs.global_batch_size
        self.most_size = min(most, self.inputs.global_batch_size)
        self.found: list[_Found] = []
        self._tails: dict[DeviceOrder, SegmentTails] = {}

    def candidates(self) -> Iterator[Candidate]:
        """Candidates of the partitions, best first; the same for the same inputs."""
        for device_order in self._promising_orders():
            self._try_sizes(device_order, self._level(_FIRST_LEVEL))
        best_orders = list(dict.fromkeys(found.device_order for found in self._ranked()))
        for device_order in best_orders[:_KEPT_ORDERS]:
            for level in _OTHER_LEVELS:
                self._try_sizes(device_order, self._level(level))
        if not self.nested:
            for found in self._ranked()[:_DESCENTS]:
                self._descend(found)
        for found in self._ranked():
            yield self._candidate(found.partition)

    def _promising_orders(self) -> list[DeviceOrder]:
        """The device orders whose partitions along coarse units are best."""
        fine, coarse = (
            device_orders(self.inputs, most_units=most, halved=self.nested)
            for most in (FINE, COARSE)
        )
        if len(fine) <= _FINE_ORDERS:
            return fine
        values: list[float] = []
        for device_order in coarse:
            found = self._try_sizes(device_order, self._level(_FIRST_LEVEL))
            values.append(found.partition.value_s if found else math.inf)
        self.found.clear()
        ranked = sorted(range(len(fine)), key=lambda at: (values[at], at))
        return [fine[at] for at in ranked[:_FINE_ORDERS]]

    def _ranked(self) -> list[_Found]:
        return sorted(self.found, key=lambda found: found.partition.value_s)

    def _try_sizes(self, device_order: DeviceOrder, sizes: ClassSizes) -> _Found | None:
        """Find the best partitions, and return the best of all."""
        costs = SegmentCosts(
            self.estimator, self._tails_of(device_order), sizes=sizes, nested=self.nested
        )
        partitions = best_partitions(costs, most_groups=self.most_groups)[:_KEPT_PARTITIONS]
        new = [
            _Found(device_order=device_order, sizes=sizes, partition=partition)
            for partition in partitions
        ]
        self.found += new
        return new[0] if new else None

    def _tails_of(self, device_order: DeviceOrder) -> SegmentTails:
        if device_order not in self._tails:
            self._tails[device_order] = SegmentTails(self.estimator, device_order)
        return self._tails[device_order]

    def _descend(self, start: _Found) -> None:
        """Change the size of one class at a time, as long as that helps."""
        best = start
        for _ in range(_STEPS):
            tried = [self._try_sizes(start.device_order, sizes) for sizes in self._near(best.sizes)]
            better = min(
                (found for found in tried if found is not None),
                key=lambda found: found.partition.value_s,
                default=best,
            )
            if better.partition.value_s >= best.partition.value_s:
                return
            best = better

    def _near(self, sizes: ClassSizes) -> Iterator[ClassSizes]:
        for each, size in sizes.items():
            known = self.inputs.space.sizes(_SIZES)
            larger = [other for other in known if size < other <= self.most_size][:1]
            smaller = [other for other in known if other < size][-1:]
            for other in smaller + larger:
                yield {**sizes, each: other}

    def _level(self, level: int) -> ClassSizes:
        block = self.inputs.space.sample_block
        level = min(level * block, self.most_size - self.most_size % block)
        found = best_sizes(self.inputs, level)
        return dict.fromkeys(found, level) if self.nested else found

    def _candidate(self, partition: Partition) -> Candidate:
        return Candidate(
            device_groups=tuple(map(self.estimator.device_groups.of, partition.groups)),
            levels=partition.sizes,
            schedule="1f1b" if self.nested else "interleaved",
        )
