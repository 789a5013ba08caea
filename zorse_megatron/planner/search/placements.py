"""The order of a plan's micro-batches, and where its layers are, each by simulating the plan.

They come last, for the fastest plans of the search: what they save is a part of the bubble, which
the closed form knows for chunks dealt out in turn only. Placements are found by hill climbing:
from a plan to the first near one that is faster by `_LEAST_GAIN`, near ones in the order of what
their busiest replica computes. Equal inputs find equal plans: the number of simulations is limited,
not their time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zorse_megatron.plan.plan import Chunk, Plan, ScheduleName
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, computations
from zorse_megatron.planner.orders import (
    busiest_s,
    least_in_flight,
    littles_law,
    with_in_flight,
    with_times,
)
from zorse_megatron.schedule.micro_batch_order import pipeline_s
from zorse_megatron.schedule.pipeline_schedules import Worker

_FINALISTS = 4
_MOST_BEHIND = 1.2
"""A plan that is slower by more than that is not tried: it hardly ever gains so much."""
_LEAST_GAIN = 0.9995
"""What another order or placement must bring, in parts of the iteration."""
_LESS = 0.85
"""A replica's limit is shrunk to this where its memory does not suffice."""
_MOST_SHRINKS = 12


@dataclass(frozen=True, kw_only=True)
class Order:
    """How much a plan has in flight."""

    splits: bool
    """Whether weight gradients are apart from backwards."""
    factor: float
    """Times what Little's law has in flight: more absorbs delays, and takes memory."""
    delayed: float = 0.0
    """Of that the part in which weight gradients may wait."""


WHOLE = tuple(Order(splits=False, factor=factor) for factor in (1.5, 3.0))
SPLIT = tuple(
    Order(splits=True, factor=factor, delayed=delayed)
    for factor, delayed in ((1.0, 1.0), (1.5, 0.3), (1.5, 0.6), (2.0, 0.3), (2.0, 0.6), (3.0, 1.0))
)


def with_best_order(evaluator: Evaluator, found: Sequence[Evaluation]) -> Evaluation:
    """The fastest of the first plans of the search, each in the order and placement best for it.

    `found`: fastest first. Plans whose time was extrapolated stay as they are: they would have to
    be simulated in full.
    """
    best = found[0]
    limit_s = _MOST_BEHIND * best.iteration_s
    for one in _unlike(found, limit_s):
        better = _in_its_best_order(evaluator, one)
        if better.iteration_s < _LEAST_GAIN * best.iteration_s:
            best = better
    return best


def _unlike(found: Sequence[Evaluation], limit_s: float) -> list[Evaluation]:
    """The fastest pipeline of each grouping and order of groups, of the first few of these."""
    by_groups: dict[tuple[tuple[int, ...], ...], Evaluation] = {}
    for one in found:
        if one.iteration_s <= limit_s and not one.is_extrapolated and _is_pipeline(one.plan):
            by_groups.setdefault(tuple(group.ranks for group in one.plan.groups), one)
    return list(by_groups.values())[:_FINALISTS]


def _in_its_best_order(evaluator: Evaluator, start: Evaluation) -> Evaluation:
    """Over its orders, then its placements, then its orders again."""
    space = evaluator.inputs.space
    orders = WHOLE + (SPLIT if space.split_backward else ())
    best, chosen = start, orders[0]
    for order in orders:
        other = ordered(evaluator, start.plan, order)
        if other is not None and other.iteration_s < _LEAST_GAIN * best.iteration_s:
            best, chosen = other, order
    if "interleaved" not in space.schedules:
        return best
    placed = _climbed(evaluator, best, chosen)
    if placed is best:
        return best
    again = (ordered(evaluator, placed.plan, order) for order in orders if order != chosen)
    tried = [placed, *(each for each in again if each is not None)]
    return min(tried, key=lambda each: each.iteration_s)


def _is_pipeline(plan: Plan) -> bool:
    return plan.schedule.name != "breadth_first" and len(plan.groups) > 1


def ordered(evaluator: Evaluator, plan: Plan, order: Order) -> Evaluation | None:
    """The plan with as much in flight as memory allows, up to what the order says."""
    inputs = evaluator.inputs.members.base
    splits = True if order.splits else None
    groups = tuple(replace(group, split_backward=splits) for group in plan.groups)
    plan = with_times(inputs, with_in_flight(replace(plan, groups=groups), {}))
    limits = littles_law(plan, order.factor)
    for _ in range(_MOST_SHRINKS):
        found = evaluator.evaluate_plan(with_in_flight(plan, limits, order.delayed))
        if found is None or found.fits:
            return found
        shrunk = dict(limits)
        for (number, index), limit in limits.items():
            ranks = plan.groups[number].replicas[index].ranks
            if any(found.peaks_bytes[rank] > inputs.capacities_bytes[rank] for rank in ranks):
                least = least_in_flight(plan, number, index)
                shrunk[number, index] = max(least, int(_LESS * limit))
        if shrunk == limits:
            return None
        limits = shrunk
    return None


# Placements: the groups of consecutive layers, with their numbers.

Rows = tuple[tuple[int, int], ...]
"""(group, number of layers) of each chunk."""
_MOST_CHUNKS = 3
"""For each group, on average."""
_ORDERED = 80
"""Near placements of one plan whose pipeline is computed, those first whose busiest replica
computes least."""
_SIMULATED = 8
"""Of these so many are simulated, with the shortest pipelines."""
_COMPUTATIONS = 200_000
"""Forwards and backwards that climbing may simulate."""


def _climbed(evaluator: Evaluator, start: Evaluation, order: Order) -> Evaluation:
    best, tried = start, {_rows_of(start.plan)}
    same = ordered(evaluator, start.plan, order)
    room = {} if same is None else _known_room(same.plan, order)
    before = evaluator.num_computations
    most = before + _COMPUTATIONS
    improves = True
    while improves:
        improves = False
        for rows in _most_hopeful(evaluator, best, order, room, tried):
            if evaluator.num_computations + computations(best.plan) > most:
                return best
            tried.add(rows)
            found = ordered(evaluator, with_placement(best.plan, rows), order)
            if found is not None and found.iteration_s < _LEAST_GAIN * best.iteration_s:
                best, room, improves = found, _known_room(found.plan, order), True
                break
    return best


def _most_hopeful(
    evaluator: Evaluator,
    best: Evaluation,
    order: Order,
    room: Mapping[Worker, int],
    tried: set[Rows],
) -> list[Rows]:
    """Near placements whose pipelines are shorter within the `room`, the shortest first."""
    inputs = evaluator.inputs.members.base

    def timed(rows: Rows) -> Plan:
        return with_times(inputs, with_placement(best.plan, rows))

    rated = []
    here = _rows_of(best.plan)
    for rows in near(here, len(best.plan.groups)) - tried:
        busy_s = busiest_s(timed(rows))
        if busy_s < best.iteration_s:
            rated.append((busy_s, len(rows), rows))
    found = []
    for _, number, rows in sorted(rated)[:_ORDERED]:
        plan = timed(rows)
        limits = {
            key: min(limit, room.get(key, limit))
            for key, limit in littles_law(plan, order.factor).items()
        }
        found.append((pipeline_s(with_in_flight(plan, limits, order.delayed)), number, rows))
    limit_s = _LEAST_GAIN * pipeline_s(best.plan)
    return [rows for seconds, _, rows in sorted(found)[:_SIMULATED] if seconds < limit_s]


def _known_room(plan: Plan, order: Order) -> dict[Worker, int]:
    """Limits that memory has shrunk, of replicas where it has."""
    wanted = littles_law(plan, order.factor)
    return {
        (number, index): replica.max_in_flight
        for number, group in enumerate(plan.groups)
        for index, replica in enumerate(group.replicas)
        if replica.max_in_flight and replica.max_in_flight < wanted[number, index]
    }


def _rows_of(plan: Plan) -> Rows:
    return tuple((chunk.group, chunk.layers[1] - chunk.layers[0]) for chunk in plan.chunks)


def with_placement(plan: Plan, rows: Rows) -> Plan:
    """The plan with its layers there; what depends on them is to be found anew."""
    chunks, first = [], 0
    for group, layers in rows:
        chunks.append(Chunk(group=group, layers=(first, first + layers)))
        first += layers
    name: ScheduleName = "interleaved" if len(rows) > len(plan.groups) else "1f1b"
    plan = replace(plan, chunks=tuple(chunks), schedule=replace(plan.schedule, name=name))
    groups = tuple(
        replace(group, replicas=tuple(replace(each, compute_s=None) for each in group.replicas))
        for group in plan.groups
    )
    return replace(plan, groups=groups)


def near(rows: Rows, num_groups: int) -> set[Rows]:
    """Placements by one step: layers that move, chunks that are made, joined or exchanged."""
    steps = (*_moved(rows), *_with_new_chunk(rows, num_groups), *_exchanged(rows), *_joined(rows))
    found = {_without_seams(step) for step in steps} - {rows}
    everyone = set(range(num_groups))
    most = _MOST_CHUNKS * num_groups
    return {each for each in found if len(each) <= most and {g for g, _ in each} == everyone}


def _moved(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """One layer from a chunk to another one."""
    for source, target in product(range(len(rows)), repeat=2):
        if source != target:
            found = list(rows)
            found[source] = (rows[source][0], rows[source][1] - 1)
            found[target] = (rows[target][0], rows[target][1] + 1)
            yield found


def _with_new_chunk(rows: Rows, num_groups: int) -> Iterator[list[tuple[int, int]]]:
    """One or two layers of a chunk for a new one of any group, anywhere."""
    places = product(range(len(rows)), range(len(rows) + 1), range(num_groups), (1, 2))
    for donor, place, group, layers in places:
        if rows[donor][1] > layers:
            found = list(rows)
            found[donor] = (rows[donor][0], rows[donor][1] - layers)
            found.insert(place, (group, layers))
            yield found


def _exchanged(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """Two neighbours."""
    for place in range(len(rows) - 1):
        yield [*rows[:place], rows[place + 1], rows[place], *rows[place + 2 :]]


def _joined(rows: Rows) -> Iterator[list[tuple[int, int]]]:
    """A chunk's layers to another one of its group."""
    for source, target in product(range(len(rows)), repeat=2):
        if source != target and rows[source][0] == rows[target][0]:
            found = list(rows)
            found[target] = (rows[target][0], rows[target][1] + rows[source][1])
            del found[source]
            yield found


def _without_seams(rows: Sequence[tuple[int, int]]) -> Rows:
    """Without empty chunks, and neighbours of one group as one."""
    found: list[tuple[int, int]] = []
    for group, layers in rows:
        if found and found[-1][0] == group:
            found[-1] = (group, found[-1][1] + layers)
        elif layers:
            found.append((group, layers))
    return tuple(found)
