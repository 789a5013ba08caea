"""Where the search ends: what makes its fastest plans faster still, by hill climbing in the plan.

The closed form knows orders and placements only where chunks are dealt out in turn. From a plan the
climb goes to the first near one that is faster by `_LEAST_GAIN`. Near are plans with more or less
in flight in one group, with weight gradients apart or not, with other placements, and those that
`PlanMoves` finds. Which are worth a simulation is found by ordering them (`Forecast`), which takes
a fifth as long and ranks them alike, within the memory that the last simulation found (`Room`).

With `--effort high` it goes on from the highest plan: a few random steps away, and up again.

It climbs without weight gradients apart, then with them from there and from the search's plans: a
plan is never slower because they are allowed. Large plans are climbed with them first, and without
only where that brings nothing.

Equal inputs find equal plans: computations are limited, not seconds.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, computations, plan_key
from zorse_megatron.planner.orders import (
    Base,
    GroupOrder,
    busiest_s,
    busy_by_group_s,
    in_flight_times,
    with_times,
)
from zorse_megatron.planner.outcome import OnProgress, SearchProgress
from zorse_megatron.planner.search.forecast import Forecast
from zorse_megatron.planner.search.orders_in_memory import Ordered, Rooms, in_order, uniform, within
from zorse_megatron.planner.search.placements import (
    layers_of,
    near,
    rows_of,
    v_shaped,
    with_placement,
)
from zorse_megatron.planner.search.plan_moves import Near, PlanMoves

_FINALISTS = 4
"""Plans of the search that are ordered, of unlike groups."""
_CLIMBED = 4
"""Of these so many are climbed from."""
_MOST_BEHIND = 1.2
"""A plan that is slower by more than that is not tried: it hardly ever gains so much."""
_HOPEFUL = 1.1
"""Other orders of a plan are tried if its first one is not slower than the best by that."""
_LEAST_GAIN = 0.9995
"""What a step must bring, in parts of the iteration."""
_ORDERED = 120
"""Near plans that are ordered, those first whose busiest replica computes least."""
_SIMULATED = 3
"""Of these so many are simulated, those first whose iteration is foretold to be shortest."""
_REGROUPED = 6
"""The same of plans that differ in more than order and placement, whose memory is foretold less."""
_TOLERANCE = 1.01
"""They are simulated even if they are foretold to be slower by that."""
_PER_SIMULATED = 5
"""What simulating a forward or backward costs, in those that are ordered."""
_FACTORS = (3.0, 2.0, 1.5, 1.0)
"""Of equally fast orders the one with more in flight: it bears more changes of placement."""
_MANY = 150
"""Plans that the budget lets order: with fewer the climb is a short one."""
_OF_MANY_ORDERED = 10
"""In which part of these near plans are ordered at a time, in a short climb."""
_DELAYED = (0.15, 0.3, 0.6)
_STEPS = (1, 2, 2, 3)
"""Random steps away from the highest plan, before it is climbed again; one of these."""
_MOST_DOWN = 1.05
"""Such a step may make the plan slower by that."""
_MISSES = 40
"""So many climbs in a row that find nothing faster are the last."""
_OF_HALVES = 4
"""The part of the budget that halves of micro-batches get beside it."""
_PARTS = (0.4, 0.6, 0.8)
"""Of what is in flight, whether it takes no less: first all of them are tried, then the last."""


def climbed_from(
    evaluator: Evaluator,
    found: Sequence[Evaluation],
    most: int,
    on_progress: OnProgress = lambda progress: None,
) -> Evaluation:
    """The fastest plan that climbing finds from the first plans of the search.

    `found`: fastest first. Plans whose time was extrapolated stay as they are: they would have to
    be simulated in full. `most`: forwards and backwards that may be ordered, of all plans together;
    a simulation counts as several orders; as many again where weight gradients may be apart.
    """
    best, ends, halved = found[0], list[Ordered](), list[Evaluation]()
    is_short = is_short_climb(best.plan, most)
    ways = (False, True) if evaluator.inputs.space.split_backward else (False,)
    for splits in ways[::-1] if is_short else ways:
        climb = Climb(evaluator, most, on_progress, splits=splits, is_short=is_short)
        so_far = [best, _fastest(ends).evaluation] if ends else []
        ends += _ends(climb, [*so_far, *found])
        if ends and climb.goes_on:
            halved.append(climb.in_halves(_fastest(ends)).evaluation)
            ends.append(climb.again(_fastest(ends)))
        if ends:
            halved.append(climb.in_halves(_fastest(ends)).evaluation)
        reached = (each.evaluation for each in ends)
        best = min([*reached, best], key=lambda each: each.iteration_s)
        if is_short and best is not found[0]:
            break
    best = min([*halved, best], key=lambda each: each.iteration_s)
    return best if is_short or best is found[0] else climb.with_less_in_flight(best)


def is_short_climb(plan: Plan, most: int) -> bool:
    """Whether plans are so large that few can be ordered: then one or two of everything."""
    return most < _MANY * computations(plan)


def _fastest(plans: Sequence[Ordered]) -> Ordered:
    return min(plans, key=lambda each: each.iteration_s)


def _ends(climb: "Climb", found: Sequence[Evaluation]) -> list[Ordered]:
    """Where one climb from these plans ends."""
    starts: dict[object, Ordered] = {}
    best_s = climb.to_beat_s(found)
    for one in climb.unlike(found, _MOST_BEHIND * best_s):
        for plan in climb.placed(one.plan):
            start = climb.started(plan, _HOPEFUL * best_s)
            if start is None:
                continue
            key = climb.kinds(start.plan), rows_of(start.plan)
            if key not in starts or start.iteration_s < starts[key].iteration_s:
                starts[key] = start
            best_s = min(best_s, start.iteration_s)
    first = sorted(starts.values(), key=lambda each: each.iteration_s)
    return [climb.climbed(start) for start in first[: 1 if climb.is_short else _CLIMBED]]


def _is_pipeline(one: Evaluation) -> bool:
    """Whether it can be climbed from."""
    is_pipeline = one.plan.schedule.name != "breadth_first" and len(one.plan.groups) > 1
    return is_pipeline and not one.is_extrapolated


class Climb:
    """Climbs from plans, until the computations that may be ordered are spent."""

    def __init__(
        self,
        evaluator: Evaluator,
        most: int,
        on_progress: OnProgress,
        *,
        splits: bool = False,
        is_short: bool = False,
    ) -> None:
        self.evaluator = evaluator
        self.splits = splits
        """Whether plans start with weight gradients apart, and groups may have them so or not."""
        self.is_short = is_short
        """See `is_short_climb`."""
        self.tell = on_progress
        self.space = evaluator.inputs.space
        self.inputs = evaluator.inputs.members.base
        """Of ranks: those of the search may be tensor-parallel groups."""
        self.forecast = Forecast(self.inputs)
        self.moves = PlanMoves(evaluator)
        self.rooms: dict[object, Rooms] = {}
        """Of plans that were simulated."""
        self.tried: set[object] = set()
        """Plans that were simulated."""
        self.most = self.left = most
        self.goes_on = (
            self.space.effort == "high" and splits == evaluator.inputs.space.split_backward
        )
        """Whether it climbs again from near the highest plan; the last of two climbs only."""

    # Where it starts: the fastest plans of unlike groups, each in the best of a few orders.

    def unlike(self, found: Sequence[Evaluation], limit_s: float) -> list[Evaluation]:
        """The fastest pipeline of each grouping and order of groups, of the first few of these."""
        by_kinds: dict[object, Evaluation] = {}
        for one in found:
            if _is_pipeline(one) and one.iteration_s <= limit_s:
                by_kinds.setdefault(self.kinds(one.plan), one)
        return list(by_kinds.values())[: 2 if self.is_short else _FINALISTS]

    def to_beat_s(self, found: Sequence[Evaluation]) -> float:
        """The time that starts are measured by: of the fastest pipeline.

        The fastest plan of all may be another, which is as fast as it gets: pipelines are still
        climbed from where no replica computes for that long.
        """
        pipeline = next(filter(_is_pipeline, found), found[0])
        busy_s = busiest_s(with_times(self.inputs, pipeline.plan))
        return pipeline.iteration_s if busy_s < found[0].iteration_s else found[0].iteration_s

    def kinds(self, plan: Plan) -> tuple[tuple[str, ...], ...]:
        """Which GPUs each group has, but for exchanges of equal ones."""
        kinds = self.inputs.kinds
        return tuple(tuple(sorted(kinds[rank] for rank in group.ranks)) for group in plan.groups)

    def placed(self, plan: Plan) -> list[Plan]:
        """As it is, and as a V, in which samples come back through all groups but the last."""
        if "interleaved" not in self.space.schedules or self.is_short:
            return [plan]
        v_like = v_shaped(rows_of(plan))
        return [plan, with_placement(plan, v_like)] if v_like != rows_of(plan) else [plan]

    def started(self, plan: Plan, limit_s: float) -> Ordered | None:
        """The plan where it fits, in other orders if the first one takes less than `limit_s`."""
        first = None
        if self._may_simulate(plan):
            first = self._in_order(plan, uniform(plan, self.splits, 2.0, 0.3), {})
        if first is None or first.iteration_s > limit_s:
            return None
        bases: list[tuple[Base, float]] = [("Little's law", factor) for factor in _FACTORS]
        bases.append(("schedule's rule", 1.0))
        tries = (
            Near(plan=plan, orders=uniform(plan, self.splits, factor, delayed, base))
            for base, factor in bases
            for delayed in (_DELAYED if self.splits else (0.0,))
        )
        found = self._simulated(first, tries, math.inf, _SIMULATED)
        return min([*found, first], key=lambda each: each.iteration_s)

    # How it goes on.

    def climbed(self, start: Ordered) -> Ordered:
        """By orders as long as they are faster, then by one other step, and so on."""
        best = start
        while self.left > 0:
            better = self._first_faster(best, self._orders(best), _LEAST_GAIN, _SIMULATED)
            if better is None:
                better = self._elsewhere(best)
            if better is None:
                break
            best = better
        return best

    def again(self, best: Ordered) -> Ordered:
        """Climb from random plans near the best one, as long as the budget lasts."""
        draw, misses = random.Random(0), 0
        while self.left > 0 and misses < _MISSES:
            start = best
            for _ in range(draw.choice(_STEPS)):
                start = self._random_step(start, draw, _MOST_DOWN * best.iteration_s)
            end = start if start is best else self.climbed(start)
            misses = 0 if end.iteration_s < best.iteration_s else misses + 1
            best = min(best, end, key=lambda each: each.iteration_s)
        return best

    def in_halves(self, best: Ordered) -> Ordered:
        """With the first and last micro-batches in halves, as many as are faster.

        Of the best end after every climb, with a budget of its own. On the way up, halves would
        hide what is left to gain; of the last end alone, a plan could be slower because more was
        tried.
        """
        of_climb, self.left = self.left, self.most // _OF_HALVES
        while self.left > 0:
            near_plans = self.moves.halved(best.plan, best.orders)
            better = self._first_faster(best, near_plans, _TOLERANCE, _REGROUPED)
            if better is None:
                better = self._first_faster(best, self._orders(best), _LEAST_GAIN, _SIMULATED)
            if better is None:
                break
            best = better
        self.left = of_climb
        return best

    def _random_step(self, here: Ordered, draw: random.Random, limit_s: float) -> Ordered:
        """A near plan of any kind, if it fits within the limit; else the same."""
        around = [*self._orders(here)]
        around += self._least_busy(here, self.moves.around(here.plan, here.orders))
        around += self._placements(here) if "interleaved" in self.space.schedules else ()
        one = draw.choice(around)
        rooms = {ranks: room for ranks, room in here.rooms.items() if ranks not in one.changed}
        if not self._may_simulate(one.plan):
            return here
        found = self._in_order(one.plan, one.orders, rooms)
        return here if found is None or found.iteration_s > limit_s else found

    def with_less_in_flight(self, best: Evaluation) -> Evaluation:
        """The plan with less memory, where it takes as long: the climb fills what there is."""
        foretold_s = self.forecast.iteration_s(best.plan)
        for least in range(len(_PARTS)):
            plan = best.plan
            for number in range(len(plan.groups)):
                tries = (in_flight_times(plan, number, part) for part in _PARTS[least:])
                as_fast = (
                    each
                    for each in tries
                    if self.forecast.iteration_s(each, foretold_s) <= foretold_s
                )
                plan = next(as_fast, plan)
            found = None if plan == best.plan else self.evaluator.evaluate_plan(plan)
            if found is not None and found.fits and found.iteration_s <= best.iteration_s:
                return found
        return best

    def _elsewhere(self, best: Ordered) -> Ordered | None:
        """A faster plan that differs in placement, or else in groups or settings."""
        better = None
        if "interleaved" in self.space.schedules:
            better = self._first_faster(best, self._placements(best), _LEAST_GAIN, _SIMULATED)
        if better is None:
            near_plans = self._least_busy(best, self.moves.around(best.plan, best.orders))
            better = self._first_faster(best, near_plans, _TOLERANCE, _REGROUPED)
        return better

    def _first_faster(
        self, best: Ordered, plans: Iterable[Near], tolerance: float, most: int
    ) -> Ordered | None:
        foretold_s = self.forecast.iteration_s(best.plan)
        found = self._simulated(best, plans, tolerance * foretold_s, most)
        limit_s = _LEAST_GAIN * best.iteration_s
        return next((each for each in found if each.iteration_s < limit_s), None)

    def _simulated(
        self, here: Ordered, plans: Iterable[Near], limit_s: float, most: int
    ) -> Iterator[Ordered]:
        """Of these plans the fastest as foretold, simulated, where they fit."""
        if self.is_short:
            few = self.most // (_OF_MANY_ORDERED * computations(here.plan))
            plans, most = islice(plans, max(6, few)), 1 + (most == _REGROUPED)
        rated, seen = [], {plan_key(here.plan), *self.tried}
        for at, one in enumerate(plans):
            rooms = {ranks: room for ranks, room in here.rooms.items() if ranks not in one.changed}
            limited = within(self.inputs, one.plan, one.orders, rooms)
            if limited is None or (key := plan_key(limited)) in seen:
                continue
            if self.left <= 0:
                break
            seen.add(key)
            self.left -= computations(limited)
            self._tell()
            seconds = self.forecast.iteration_s(limited, limit_s)
            if seconds < limit_s:
                rated.append((seconds, len(one.plan.chunks), at, key, one, rooms))
        for *_, key, one, rooms in sorted(rated, key=lambda each: each[:3])[:most]:
            if not self._may_simulate(one.plan):
                return
            self.tried.add(key)
            found = self._in_order(one.plan, one.orders, rooms)
            if found is not None:
                yield found

    def _in_order(self, plan: Plan, orders: tuple[GroupOrder, ...], rooms: Rooms) -> Ordered | None:
        before = self.evaluator.num_computations
        found = in_order(self.evaluator, plan, orders, rooms, self.rooms)
        self.left -= _PER_SIMULATED * (self.evaluator.num_computations - before)
        self._tell(found)
        return found

    def _tell(self, found: Ordered | None = None) -> None:
        best, done = found and found.evaluation, min(self.most, self.most - self.left)
        self.tell(SearchProgress(phase="climbing", done=done, total=self.most, best=best))

    def _may_simulate(self, plan: Plan) -> bool:
        """Whether one simulation of it is within the budget."""
        return _PER_SIMULATED * computations(plan) <= self.left

    def _orders(self, best: Ordered) -> Iterator[Near]:
        """One group with more or less in flight, with more or fewer weight gradients that wait."""
        for number, order in enumerate(best.orders):
            others = [replace(order, factor=times * order.factor) for times in (0.8, 1.25)]
            if order.splits:
                others += [replace(order, delayed=times * order.delayed) for times in (0.5, 2.0)]
            if self.splits:
                others.append(replace(order, splits=not order.splits, delayed=order.delayed or 0.3))
            for other in others:
                orders: tuple[GroupOrder, ...] = (
                    *best.orders[:number],
                    other,
                    *best.orders[number + 1 :],
                )
                yield Near(plan=best.plan, orders=orders)

    def _placements(self, best: Ordered) -> Iterator[Near]:
        """Those whose busiest group computes least, if each of its layers takes as long."""
        here = rows_of(best.plan)
        layers = layers_of(here)
        per_layer_s = {
            number: busy_s / layers[number] for number, busy_s in busy_by_group_s(best.plan).items()
        }
        rated = []
        for rows in near(here, len(best.plan.groups)):
            counts = layers_of(rows)
            busy_s = max(counts[number] * each_s for number, each_s in per_layer_s.items())
            if busy_s < best.iteration_s:
                rated.append((busy_s, len(rows), rows))
        for *_, rows in sorted(rated)[:_ORDERED]:
            yield Near(plan=with_placement(best.plan, rows), orders=best.orders)

    def _least_busy(self, best: Ordered, plans: Iterable[Near]) -> Iterator[Near]:
        """Those whose busiest replica computes least."""
        rated = []
        for at, one in enumerate(plans):
            if problems_of(one.plan):
                continue
            busy_s = busiest_s(with_times(self.inputs, one.plan))
            if busy_s < best.iteration_s:
                rated.append((busy_s, len(one.plan.chunks), at, one))
        for *_, one in sorted(rated, key=lambda each: each[:3])[:_ORDERED]:
            yield one
