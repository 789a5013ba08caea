"""Plans in an order that fits their memory, which simulations measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, plan_key
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.orders import (
    Base,
    GroupOrder,
    InFlight,
    least_in_flight,
    limits_by_rule,
    littles_law,
    with_in_flight,
    with_times,
)
from zorse_megatron.schedule.micro_batch_order import most_held
from zorse_megatron.schedule.pipeline_schedules import Worker
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import SimulationResult

_MOST_TRIES = 4
"""Simulations until a plan's limits fit its memory."""
_SAFE = 0.97
"""Of the memory that seems to be free: less with each simulation that was too full."""

_HOPELESS = 0.9
"""Room for less than this part of one micro-batch is too little; more may suffice: it is foretold
to some percent."""

Ranks = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Room:
    """A replica's memory, as a simulation found it."""

    free_bytes: float
    """Beside all but activations."""
    unit_bytes: float
    """Activations of one sample in one layer."""
    layer_bytes: float
    """All else, of one layer."""
    layers: int

    def units(self, layers: int) -> float:
        """Samples times layers that there is room for, with so many layers."""
        return (self.free_bytes - (layers - self.layers) * self.layer_bytes) / self.unit_bytes


Rooms = Mapping[Ranks, Room]
"""Of replicas, by their ranks."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """A plan that fits, in an order."""

    evaluation: Evaluation
    orders: tuple[GroupOrder, ...]
    rooms: Rooms

    @property
    def iteration_s(self) -> float:
        return self.evaluation.iteration_s

    @property
    def plan(self) -> Plan:
        return self.evaluation.plan


def uniform(
    plan: Plan, splits: bool, factor: float, delayed: float, base: Base = "Little's law"
) -> tuple[GroupOrder, ...]:
    """The same order for all groups."""
    order = GroupOrder(splits=splits, factor=factor, delayed=delayed, base=base)
    return (order,) * len(plan.groups)


def in_order(
    evaluator: Evaluator,
    plan: Plan,
    orders: tuple[GroupOrder, ...],
    rooms: Rooms,
    known: dict[object, Rooms],
) -> Ordered | None:
    """The plan in this order, with no more in flight than memory allows; None: it does not fit.

    `known`: of plans that were simulated before; new ones are added.
    """
    inputs = evaluator.inputs.members.base
    safe = 1.0
    for _ in range(_MOST_TRIES):
        limited = within(inputs, plan, orders, rooms, safe)
        found = None if limited is None else evaluator.evaluate_plan(limited)
        if found is None:
            return None
        key = plan_key(found.plan)
        if key not in known:
            result = found.result or evaluator.simulated(found.plan)
            assert result is not None, "the plan has been simulated before"
            known[key] = _rooms(inputs, found.plan, result)
        rooms = known[key]
        if found.fits:
            return Ordered(evaluation=replace(found, result=None), orders=orders, rooms=rooms)
        safe *= _SAFE
    return None


def within(
    inputs: Inputs, plan: Plan, orders: Sequence[GroupOrder], rooms: Rooms, safe: float = 1.0
) -> Plan | None:
    """The plan with its times and limits; None: a replica has no room for one micro-batch."""
    groups = tuple(
        replace(group, split_backward=True if order.splits else None)
        for group, order in zip(plan.groups, orders, strict=True)
    )
    plan = with_times(inputs, with_in_flight(replace(plan, groups=groups), {}))
    limits: dict[Worker, InFlight] = {}
    by_law, by_rule = littles_law(plan), limits_by_rule(plan)
    for key in by_law:
        number, index = key
        order, least = orders[number], least_in_flight(plan, number, index)
        needed = by_law[key] if order.base == "Little's law" else by_rule[key]
        most = max(least, int(order.factor * needed))
        # Less than one micro-batch would be none.
        delayed = max(least, int(order.delayed * most))
        room = rooms.get(plan.groups[number].replicas[index].ranks)
        if room is not None:
            units = room.units(plan.num_layers_of_group(number))
            if units < _HOPELESS * least:
                return None
            units = max(least, int(safe * units))
            most = min(most, units)
            delayed = min(delayed, units - most)
        limits[key] = InFlight(most=most, delayed=delayed)
    return with_in_flight(plan, limits)


def _rooms(inputs: Inputs, plan: Plan, result: SimulationResult) -> dict[Ranks, Room]:
    """Of all replicas that keep activations, by their fullest ranks."""
    found = {}
    for (number, index), held in most_held(plan).items():
        layers = plan.num_layers_of_group(number)
        ranks = plan.groups[number].replicas[index].ranks
        peaks = [result.memory[rank] for rank in ranks]
        unit_bytes = max(peak.by_category_bytes[Category.ACTIVATIONS] for peak in peaks) / held
        others = [peak.total_bytes - peak.at_peak_bytes[Category.ACTIVATIONS] for peak in peaks]
        if unit_bytes:
            found[ranks] = Room(
                free_bytes=min(
                    inputs.capacities_bytes[rank] - other
                    for rank, other in zip(ranks, others, strict=True)
                ),
                unit_bytes=unit_bytes,
                layer_bytes=max(others) / layers,
                layers=layers,
            )
    return found
