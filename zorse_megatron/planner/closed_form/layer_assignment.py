"""Layers per group, by exact dynamic programming over a table of costs.

A pipeline takes the time of its slowest group, and one pass of a micro-batch through all groups to
fill and to drain it. So what is minimised is max(busy) + sum(fill/drain). For each ceiling on busy
the least sum of fill/drain times is found by dynamic programming over groups and layers; the best
ceiling is one of the busy times of the table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


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
    where no choice adds up to `num_layers`. O(ceilings * groups * table * layers), in numpy, with
    ceilings left out that cannot be better.
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
    """A group's table as arrays, one row for each number of layers, fewest first."""

    def __init__(self, table: Mapping[int, GroupCost], num_layers: int) -> None:
        rows = [(number, table[number]) for number in sorted(table) if number <= num_layers]
        self.numbers = np.array([number for number, _ in rows], dtype=int)
        self.busy_s = np.array([cost.busy_s for _, cost in rows])
        self.fill_drain_s = np.array([[cost.fill_drain_s] for _, cost in rows])
        before = np.arange(num_layers + 1) - self.numbers[:, np.newaxis]
        self.before = np.where(before < 0, num_layers + 1, before)
        """Row, layers up to here -> layers before this group; where below 0, one beyond all."""


def _least_fill_drain(
    tables: Sequence[_Rows], num_layers: int, ceiling: float
) -> tuple[int, ...] | None:
    """Layers with the least sum of fill/drain times, no group busier than the ceiling.

    Of equal sums, the one with the fewest layers in the last group.
    """
    totals = np.arange(num_layers + 1)
    sums = np.full(num_layers + 2, np.inf)  # the last one: of what is not possible
    sums[0] = 0.0
    choices = []
    for table in tables:
        allowed = table.busy_s <= ceiling
        if not allowed.any():
            return None
        reached = sums[table.before[allowed]] + table.fill_drain_s[allowed]
        least = reached.argmin(axis=0)
        sums[:-1] = reached[least, totals]
        choices.append(table.numbers[allowed][least])
    if not np.isfinite(sums[num_layers]):
        return None
    layers, left = [], num_layers
    for choice in reversed(choices):
        layers.append(int(choice[left]))
        left -= layers[-1]
    return tuple(reversed(layers))
