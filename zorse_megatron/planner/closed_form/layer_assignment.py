"""Layers per group, by exact dynamic programming over a table of costs.

A pipeline takes the time of its slowest group, and one pass of a micro-batch through all groups to
fill and to drain it. So what is minimised is max(busy) + sum(fill/drain). For each ceiling on busy
the least sum of fill/drain times is found by dynamic programming over groups and layers; the best
ceiling is one of the busy times of the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """What a group costs with a number of layers."""

    busy_s: float
    """Computation of its slowest replica in one iteration."""
    fill_drain_s: float
    """What it adds to the time to fill and drain the pipeline."""


@dataclass(frozen=True, kw_only=True)
class LayerAssignment:
    """Layers of each group, and the value."""

    layers: tuple[int, ...]
    value_s: float
    """max(busy) + sum(fill/drain)."""


def best_layer_assignments(
    tables: Sequence[Mapping[int, GroupCost]], num_layers: int, *, most: int = 1
) -> tuple[LayerAssignment, ...]:
    """Return the best assignment, and up to `most` - 1 of those of other ceilings, best first.

    `tables`: for each group, number of layers -> cost; only numbers that are possible. Empty
    where no choice adds up to `num_layers`. O(ceilings * groups * table * layers), with ceilings
    left out that cannot be better.
    """
    if not all(tables):
        return ()
    least_fill_drain = sum(min(cost.fill_drain_s for cost in table.values()) for table in tables)
    floor_s = max(min(cost.busy_s for cost in table.values()) for table in tables)
    ceilings = sorted(
        {cost.busy_s for table in tables for cost in table.values() if cost.busy_s >= floor_s}
    )
    found: dict[tuple[int, ...], float] = {}
    worst_kept = float("inf")
    start = _first_feasible(tables, num_layers, ceilings)
    rows = [_Rows(table, num_layers) for table in tables]
    for ceiling in ceilings[start:]:
        if len(found) >= most and ceiling + least_fill_drain >= worst_kept:
            break
        layers = _least_fill_drain(rows, num_layers, ceiling)
        if layers is None:
            continue
        found[layers] = _value(tables, layers)
        values = sorted(found.values())
        worst_kept = values[min(most, len(values)) - 1]
    best = sorted(found.items(), key=lambda item: (item[1], item[0]))[:most]
    return tuple(LayerAssignment(layers=layers, value_s=value) for layers, value in best)


def _value(tables: Sequence[Mapping[int, GroupCost]], layers: Sequence[int]) -> float:
    costs = [table[number] for table, number in zip(tables, layers, strict=True)]
    return max(cost.busy_s for cost in costs) + sum(cost.fill_drain_s for cost in costs)


def _first_feasible(
    tables: Sequence[Mapping[int, GroupCost]], num_layers: int, ceilings: Sequence[float]
) -> int:
    """The first ceiling with any assignment, by bisection on sets of reachable sums."""
    low, high = 0, len(ceilings)
    while low < high:
        middle = (low + high) // 2
        if _is_reachable(tables, num_layers, ceilings[middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _is_reachable(
    tables: Sequence[Mapping[int, GroupCost]], num_layers: int, ceiling: float
) -> bool:
    mask, sums = (1 << (num_layers + 1)) - 1, 1
    for table in tables:
        shifted = 0
        for number, cost in table.items():
            if cost.busy_s <= ceiling:
                shifted |= sums << number
        sums = shifted & mask
    return bool(sums >> num_layers & 1)


class _Rows:
    """A group's table, fewest layers first."""

    def __init__(self, table: Mapping[int, GroupCost], num_layers: int) -> None:
        self.rows = [
            (number, cost.busy_s, cost.fill_drain_s)
            for number, cost in sorted(table.items(), key=itemgetter(0))
            if number <= num_layers
        ]

    def allowed(self, ceiling: float) -> list[tuple[int, float]]:
        """Layers and fill/drain time of what is no busier than the ceiling."""
        return [(number, time_s) for number, busy_s, time_s in self.rows if busy_s <= ceiling]


def _least_fill_drain(
    tables: Sequence[_Rows], num_layers: int, ceiling: float
) -> tuple[int, ...] | None:
    """Layers with the least sum of fill/drain times, no group busier than the ceiling.

    Of equal sums, the one with the fewest layers in the last group. Only sums of layers that the
    groups after can complete are followed: with tables around a center these are few.
    """
    groups = [table.allowed(ceiling) for table in tables]
    if not all(groups):
        return None
    sums, choices = {0: 0.0}, []
    for rows, (least, most) in zip(groups, _completable(groups, num_layers), strict=True):
        reached: dict[int, float] = {}
        chosen: dict[int, int] = {}
        for number, time_s in rows:
            for before, before_s in sums.items():
                now, now_s = before + number, before_s + time_s
                if least <= now <= most and (now not in reached or now_s < reached[now]):
                    reached[now], chosen[now] = now_s, number
        sums = reached
        choices.append(chosen)
    if num_layers not in sums:
        return None
    layers, left = [], num_layers
    for choice in reversed(choices):
        layers.append(choice[left])
        left -= layers[-1]
    return tuple(reversed(layers))


def _completable(
    groups: Sequence[Sequence[tuple[int, float]]], num_layers: int
) -> list[tuple[int, int]]:
    """After each group, the fewest and the most layers that those after it can complete."""
    found, least, most = [], num_layers, num_layers
    for rows in reversed(groups):
        found.append((least, most))
        least, most = least - rows[-1][0], most - rows[0][0]
    return found[::-1]
