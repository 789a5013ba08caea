"""Closed-form estimates of candidates, and the best layers for their groups."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate, balanced_layers
from zorse_megatron.planner.closed_form.communication import CommunicationCosts
from zorse_megatron.planner.closed_form.device_groups import (
    DeviceGroup,
    DeviceGroups,
    Stage,
    StagePosition,
)
from zorse_megatron.planner.closed_form.pipeline_time import (
    CostedPipeline,
    InFlight,
    PipelineTimes,
    SizedGroup,
)
from zorse_megatron.planner.closed_form.stage_costs import StageCost, StageCostModel
from zorse_megatron.planner.inputs.search_inputs import Inputs

# Layers per group, by exact dynamic programming over a table of costs.
#
# A pipeline takes the time of its slowest group, and one pass of a micro-batch through all groups
# to fill and to drain it. So what is minimised is max(busy) + sum(fill/drain). For each ceiling on
# busy the least sum of fill/drain times is found by dynamic programming over groups and layers; the
# best ceiling is one of the busy times of the table.


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """What a group costs with a number of layers."""

    busy_s: float
    """Computation of its slowest replica in one iteration."""
    fill_drain_s: float
    """What it adds to the time to fill and drain the pipeline."""


def best_layer_assignments(
    tables: Sequence[Mapping[int, GroupCost]], num_layers: int, *, most: int = 1
) -> list[tuple[int, ...]]:
    """Return the best layers of each group, and up to `most` - 1 of those of other ceilings.

    Best first: by max(busy) + sum(fill/drain). `tables`: for each group, number of layers -> cost;
    only numbers that are possible. Empty where no choice adds up to `num_layers`.
    O(ceilings * groups * table * layers), with ceilings left out that cannot be better.
    """
    if not all(tables):
        return []
    least_fill_drain = sum(min(cost.fill_drain_s for cost in table.values()) for table in tables)
    floor_s = max(min(cost.busy_s for cost in table.values()) for table in tables)
    ceilings = sorted(
        {cost.busy_s for table in tables for cost in table.values() if cost.busy_s >= floor_s}
    )
    found: dict[tuple[int, ...], float] = {}
    worst_kept = float("inf")
    start = bisect_left(ceilings, True, key=lambda each: _is_reachable(tables, num_layers, each))
    rows = [
        sorted((n, cost.busy_s, cost.fill_drain_s) for n, cost in table.items() if n <= num_layers)
        for table in tables
    ]
    for ceiling in ceilings[start:]:
        if len(found) >= most and ceiling + least_fill_drain >= worst_kept:
            break
        layers = _least_fill_drain(rows, num_layers, ceiling)
        if layers is None:
            continue
        found[layers] = _value(tables, layers)
        values = sorted(found.values())
        worst_kept = values[min(most, len(values)) - 1]
    return sorted(found, key=lambda layers: (found[layers], layers))[:most]


def _value(tables: Sequence[Mapping[int, GroupCost]], layers: Sequence[int]) -> float:
    costs = [table[number] for table, number in zip(tables, layers, strict=True)]
    return max(cost.busy_s for cost in costs) + sum(cost.fill_drain_s for cost in costs)


def _is_reachable(
    tables: Sequence[Mapping[int, GroupCost]], num_layers: int, ceiling: float
) -> bool:
    """Whether any assignment is within the ceiling, by the sets of sums that can be reached."""
    mask, sums = (1 << (num_layers + 1)) - 1, 1
    for table in tables:
        shifted = 0
        for number, cost in table.items():
            if cost.busy_s <= ceiling:
                shifted |= sums << number
        sums = shifted & mask
    return bool(sums >> num_layers & 1)


def _least_fill_drain(
    tables: Sequence[Sequence[tuple[int, float, float]]], num_layers: int, ceiling: float
) -> tuple[int, ...] | None:
    """Layers with the least sum of fill/drain times, no group busier than the ceiling.

    `tables`: of each group (layers, busy, fill/drain), fewest layers first. Of equal sums, the one
    with the fewest layers in the last group. Only sums of layers that the groups after can complete
    are followed: with tables around a center these are few.
    """
    groups = [[(n, time_s) for n, busy_s, time_s in rows if busy_s <= ceiling] for rows in tables]
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


# Numbers of layers that are costed for a group: those that balance speeds, and so many around, in
# all and as a part of them.
_AROUND, _AROUND_PART = 1, 0.2


@dataclass(frozen=True, kw_only=True)
class _CostRow:
    """A group with its layers."""

    stage: Stage
    cost: StageCost
    group_cost: GroupCost
    in_flight_limit: float
    """Samples that the device group may really have in flight: limits are rounded up."""


class _CostTable:
    """A group but for its layers; each number of them is costed once."""

    def __init__(
        self,
        cost_model: StageCostModel,
        sized: SizedGroup,
        position: StagePosition,
        reserve_bytes: int,
    ) -> None:
        self.cost_model = cost_model
        self.sized = sized
        self.position = position
        self.reserve_bytes = reserve_bytes
        self._rows: dict[int, _CostRow | None] = {}

    def row(self, num_layers: int) -> _CostRow | None:
        """None where so many layers do not fit."""
        if num_layers not in self._rows:
            self._rows[num_layers] = self._find(num_layers)
        return self._rows[num_layers]

    def _find(self, num_layers: int) -> _CostRow | None:
        sized, position = self.sized, self.position
        stage = Stage(sized.device_group, num_layers, sized.sizes, position, self.reserve_bytes)
        cost = self.cost_model.cost(stage)
        if cost is None:
            return None
        fill_drain_s = cost.mean_micro_batch_s / stage.num_chunks
        return _CostRow(
            stage=stage,
            cost=cost,
            group_cost=GroupCost(busy_s=cost.busy_s, fill_drain_s=fill_drain_s),
            in_flight_limit=self._in_flight_limit(stage, cost),
        )

    def _in_flight_limit(self, stage: Stage, cost: StageCost) -> float:
        if stage.position.schedule == "breadth_first":
            return 0.0  # it has none
        counts = self.cost_model.counts(stage, cost.settings)
        return sum(
            len(gpu_class.ranks) * size * self.cost_model.memory.limit(stage.position, count)
            for gpu_class, size, count in zip(
                stage.device_group.gpu_classes, stage.sizes, counts, strict=True
            )
        )


class Estimator:
    """Costs candidates."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.device_groups = DeviceGroups(inputs)
        self.cost_model = StageCostModel(inputs)
        self.communication = CommunicationCosts(inputs)
        self.in_flight = InFlight(self.cost_model, self.communication)
        self._times = PipelineTimes(self.in_flight)
        self.num_estimated = 0
        self._made: dict[tuple[DeviceGroup, tuple[int, ...], StagePosition, int], _CostTable] = {}

    def best(self, candidate: Candidate, *, most: int = 1) -> list[Estimate]:
        """Estimates with the best layers, best first; empty where nothing fits."""
        num_groups = len(candidate.device_groups)
        if num_groups > self.inputs.num_layers:
            return []
        if (
            candidate.schedule == "interleaved"
            and candidate.num_chunks > 1
            and self.in_flight.differs(candidate)
        ):
            return []  # groups that are out of step in every turn: never worth it
        found: list[Estimate] = []
        chunks = candidate.num_chunks
        if chunks > 1 and self.inputs.num_layers % chunks == 0:
            found += self._best(candidate, most=most, step=chunks)
        found += self._best(candidate, most=most, step=1)
        return sorted(found, key=lambda each: (each.iteration_s, each.layers))[:most]

    def _best(self, candidate: Candidate, *, most: int, step: int) -> list[Estimate]:
        """As `best`, with numbers of layers that are multiples of a step: equal chunks."""
        costed = self._cost_tables(candidate)
        for center in self._centers(candidate, costed):
            tables = self._tables(costed, center, step)
            assignments = best_layer_assignments(tables, self.inputs.num_layers, most=most)
            if assignments:
                found = [self._estimate(candidate, costed, layers) for layers in assignments]
                return [each for each in found if each is not None]
        return []

    def _centers(
        self, candidate: Candidate, costed: Sequence[_CostTable]
    ) -> Iterator[tuple[int, ...]]:
        """Layers of each group to look around: balanced; then balanced as far as they fit."""
        speeds = [
            self.in_flight.speed(device_group, level)
            for device_group, level in zip(candidate.device_groups, candidate.levels, strict=True)
        ]
        num_layers = self.inputs.num_layers
        yield balanced_layers(num_layers, speeds)[0]
        most = [self._most_layers(table, len(costed)) for table in costed]
        layers, slowest = balanced_layers(num_layers, speeds, most)
        if slowest < math.inf:
            yield layers

    def _most_layers(self, table: _CostTable, num_groups: int) -> int:
        """The most that a group can hold, by bisection."""
        low, high = 0, self.inputs.num_layers - num_groups + 1
        while low < high:
            middle = (low + high + 1) // 2
            if table.row(middle) is None:
                high = middle - 1
            else:
                low = middle
        return low

    def estimate(self, candidate: Candidate, layers: Sequence[int]) -> Estimate | None:
        """The cost of a candidate with these layers; None where it does not fit."""
        return self._estimate(candidate, self._cost_tables(candidate), layers)

    def _estimate(
        self, candidate: Candidate, costed: Sequence[_CostTable], layers: Sequence[int]
    ) -> Estimate | None:
        self.num_estimated += 1
        found = [table.row(count) for table, count in zip(costed, layers, strict=True)]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            return None
        groups = candidate.device_groups
        around = candidate.num_chunks > 1 and len(groups) > 1
        pairs = [*pairwise(groups), *([(groups[-1], groups[0])] if around else [])]
        return self._times.estimate(
            CostedPipeline(
                candidate=candidate,
                stages=tuple(row.stage for row in rows),
                costs=tuple(row.cost for row in rows),
                paths=tuple(self.communication.path(*pair) for pair in pairs),
                in_flight_limits=[row.in_flight_limit for row in rows],
            )
        )

    def _tables(
        self, costed: Sequence[_CostTable], center: Sequence[int], step: int
    ) -> list[dict[int, GroupCost]]:
        """For each group costs of the numbers of layers around the center, multiples of a step."""
        most = self.inputs.num_layers - len(costed) + 1
        result = []
        for table, middle in zip(costed, center, strict=True):
            around = max(step, _AROUND + int(_AROUND_PART * middle + 0.5))
            low, high = max(1, middle - around), min(most, middle + around)
            numbers = (n for n in range(low, high + 1) if n % step == 0)
            result.append({n: row.group_cost for n in numbers if (row := table.row(n))})
        return result

    def _cost_tables(self, candidate: Candidate) -> list[_CostTable]:
        sized_groups = self.in_flight.sized_groups(candidate)
        positions = self.in_flight.positions(candidate)
        reserves = candidate.reserves or (0,) * len(sized_groups)
        return [
            self._cost_table(*row) for row in zip(sized_groups, positions, reserves, strict=True)
        ]

    def _cost_table(
        self, sized: SizedGroup, position: StagePosition, reserve_bytes: int
    ) -> _CostTable:
        key = (sized.device_group, sized.sizes, position, reserve_bytes)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _CostTable(self.cost_model, sized, position, reserve_bytes)
        return found
