"""The best contiguous partition of a device order into groups.

Good pipelines over many nodes have groups of GPUs that are near one another, in an order that
crosses slow links once, with whole numbers of layers and equal times. Groups along the edges of
nodes rarely balance, because a layer is a large unit; a contiguous partition balances to a GPU.

For a device order the best partition is found exactly, by dynamic programming over (position,
layers so far), for costs of segments in closed form (`segment_costs`). Like the layers of a fixed
grouping (`layer_assignment`), max(busy) + sum(fill/drain) is minimised: for a ceiling on busy the
least sum, for a few ceilings from the least possible one up. What is in flight in a segment depends
on the GPUs after it, and in a device order those are known.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zorse_megatron.planner.closed_form.segment_costs import SegmentCosts

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
