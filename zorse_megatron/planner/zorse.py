"""The search for the best plan: groupings, schedules, orders, sizes; then the simulator decides."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product, zip_longest

from zorse_megatron.planner.effort import LEVELS, Effort
from zorse_megatron.planner.estimate import Estimator
from zorse_megatron.planner.groupings import EVERY_PARTITION_UP_TO, Groupings
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.judge import Judge, Verdict, best_first
from zorse_megatron.planner.line_search import LineSearch
from zorse_megatron.planner.orders import orders
from zorse_megatron.planner.outcome import Progress
from zorse_megatron.planner.outline import Estimate, Outline
from zorse_megatron.planner.stage import Level
from zorse_megatron.planner.teams import Team, Teams
from zorse_megatron.topology.partition import Candidate

Way = tuple[str, int]
"""Schedule and chunks of each group."""
_CHUNKS = {"1f1b": (1,), "interleaved": (1, 2), "breadth_first": (1, 2, 4)}
_QUICK_LEVELS = (2, 4)
_SLACKS = (0.0, 0.5, 1.0, 1.5, 2.0)
_TURNS = 3  # of looking around the best groupings
_POLISHING_STEPS = 6
# Of one step's outlines that are priced with the best layers, while polishing and behind it.
_SWAPS, _NEAR = 6, 60
_HOPELESS = 1.03  # estimates so much longer than a simulated iteration are not simulated
_PROMISING = 1.005  # previews so much longer than a simulated iteration are left at that
_FIT_TRIES = 4
_FINALISTS_PART = 0.6  # of the simulations; the rest is for the local search


class ZorseSearch:
    """One search."""

    def __init__(self, inputs: Inputs, on_progress: Callable[[Progress], None]) -> None:
        self.inputs = inputs
        self.report = on_progress
        self.effort = Effort.of(inputs)
        self.estimator = Estimator(inputs)
        self.teams = Teams(inputs)
        self.groupings = Groupings(self.estimator, self.teams)
        self.judge = Judge(inputs, self.estimator)
        self.verdicts: dict[object, Verdict] = {}
        self.estimates: dict[object, Estimate] = {}

    def run(self) -> list[Verdict]:
        """All verdicts that fit, fastest first; empty where nothing does."""
        outlines = self._promising()
        self._price(outlines)
        self._cut_lines()
        self._polish()
        self._simulate_finalists()
        self._improve()
        return best_first(list(self.verdicts.values()))

    def _simulate_finalists(self) -> None:
        """The best estimates, by previews, until the budget's part is spent or none is better."""
        budget = _FINALISTS_PART * self.effort.computations
        ranked: list[tuple[float, int, Estimate]] = []
        finalists = self._finalists(self.effort.finalists)
        for number, estimate in enumerate(finalists):
            self.report(Progress(phase="simulating", done=number, total=len(finalists)))
            preview = self.judge.preview(estimate)
            value_s = estimate.iteration_s if preview is None else preview.iteration_s
            ranked.append((value_s, number, estimate))
            if self.judge.num_computations > budget:
                break
        for value_s, _, estimate in sorted(ranked, key=lambda row: row[:2]):
            best = best_first(list(self.verdicts.values()))[:1]
            if best and self.judge.num_computations > 1.5 * budget:
                return
            # The closed form leaves out some of the waiting, so it is hardly ever too long.
            if not best or value_s < _HOPELESS * best[0].iteration_s:
                self.fit(estimate)

    # Groupings.

    def _promising(self) -> list[Candidate]:
        """The groupings that are worth a closer look."""
        rows = self.groupings.start(self.effort.listed)
        self.report(Progress(phase="grouping", done=1, total=1 + _TURNS))
        priced: dict[tuple[tuple[int, ...], ...], tuple[float, Candidate]] = {}

        def price(found: list[tuple[float, Candidate]], most: int) -> None:
            feasible = 0
            for tries, (_, candidate) in enumerate(found, start=1):
                estimate = self._quick(candidate)
                if estimate is not None:
                    feasible += 1
                    priced[candidate.grouping] = (estimate.iteration_s, candidate)
                if feasible >= most or tries >= 2 * most:
                    return

        price(rows, self.effort.priced)
        for turn in range(_TURNS):
            self.report(Progress(phase="grouping", done=1 + turn, total=1 + _TURNS))
            best = sorted(priced.values(), key=lambda row: (row[0], row[1].grouping))
            for _, candidate in best[: max(1, self.effort.widened // 2)]:
                near = self.groupings.around(candidate.grouping, 2 * self.effort.priced)
                price(near, max(2, self.effort.priced // 4))
        best = sorted(priced.values(), key=lambda row: (row[0], row[1].grouping))
        chosen = [candidate for _, candidate in best[: self.effort.widened]]
        plain = [row[1] for row in rows if row[1].origin in ("together", "by kind", "by node")]
        return list(dict.fromkeys([*chosen, *plain]))

    def _quick_ways(self) -> list[Way]:
        """One with little to recompute, and two that fit where memory is short."""
        schedules = self.inputs.space.schedules
        first = [name for name in ("1f1b", "interleaved") if name in schedules][:1]
        ways = [(name, 1) for name in first]
        return ways + [("breadth_first", n) for n in (2, 4) if "breadth_first" in schedules]

    def _quick(self, candidate: Candidate) -> Estimate | None:
        groups = [self.teams.of(group) for group in candidate.grouping]
        found: list[Estimate] = []
        for teams in orders(self.inputs, groups)[: self.effort.quick_orders]:
            for levels, way in product((_QUICK_LEVELS, (1,)), self._quick_ways()):
                new = [
                    estimate
                    for level in self._levels(levels)
                    for estimate in self.estimator.best(
                        self._outline(teams, level, way, candidate.origin)
                    )
                ]
                found += new
                if new:
                    break
        return min(found, key=lambda estimate: estimate.iteration_s, default=None)

    def _in_order(self, candidate: Candidate) -> tuple[Team, ...]:
        return orders(self.inputs, [self.teams.of(group) for group in candidate.grouping])[0]

    def _levels(self, wanted: tuple[int, ...]) -> list[int]:
        most = self.inputs.space.max_micro_batch_size or wanted[-1]
        most = min(most, self.inputs.global_batch_size)
        return [level for level in wanted if level <= most] or [1]

    @staticmethod
    def _outline(teams: tuple[Team, ...], level: int, way: Way, origin: str) -> Outline:
        return Outline(
            teams=teams,
            levels=(level,) * len(teams),
            schedule=way[0],
            num_chunks=way[1],
            origin=origin,
        )

    # Prices.

    def ways(self) -> list[Way]:
        """Schedules and numbers of chunks."""
        return [
            (schedule, chunks)
            for schedule in self.inputs.space.schedules
            for chunks in _CHUNKS[schedule]
        ]

    def _price(self, found: list[Candidate]) -> None:
        """Price groupings in all ways."""
        for number, candidate in enumerate(found):
            self.report(Progress(phase="pricing", done=number, total=len(found)))
            groups = [self.teams.of(group) for group in candidate.grouping]
            for teams in orders(self.inputs, groups)[: self.effort.orders]:
                for way in self.ways():
                    for level in self._levels(self.effort.levels):
                        outline = self._outline(teams, level, way, candidate.origin)
                        for slack in self.effort.slacks if way[0] == "1f1b" else (1.0,):
                            self._remember(replace(outline, slack=slack))
                if len(teams) == 1 and "breadth_first" in self.inputs.space.schedules:
                    self._price_layer_by_layer(teams)

    def _price_layer_by_layer(self, teams: tuple[Team, ...]) -> None:
        """One group with a chunk for every layer or two: what Cephalo does."""
        for chunks in (self.inputs.num_layers, -(-self.inputs.num_layers // 2)):
            for level in self._levels(self.effort.levels):
                self._remember(self._outline(teams, level, ("breadth_first", chunks), "together"))

    def _remember(self, outline: Outline) -> Estimate | None:
        found = self.estimator.best(outline, most=self.effort.layouts)
        for estimate in found:
            self.estimates.setdefault(_key(estimate), estimate)
        return found[0] if found else None

    def _cut_lines(self) -> None:
        """Groups cut out of lines of all GPUs, where there are too many for every partition."""
        if self.inputs.world_size <= EVERY_PARTITION_UP_TO:
            return
        for number, schedule in enumerate(("1f1b", "interleaved")):
            self.report(Progress(phase="cutting", done=number, total=2))
            if schedule in self.inputs.space.schedules:
                search = LineSearch(
                    self.estimator,
                    self.teams,
                    nested=schedule == "1f1b",
                    most_groups=self.groupings.most,
                )
                for outline in islice(search.outlines(), self.effort.cuts):
                    self._remember(outline)

    def _polish(self) -> None:
        """Better levels and orders for the best estimates, by closed form."""
        for estimate in self._finalists(self.effort.polished):
            best = estimate
            for _ in range(_POLISHING_STEPS):
                found = [
                    near
                    for each in self._promising_swaps(best)
                    for near in self.estimator.best(each)
                ]
                if self.effort.keeps_all:
                    for near in found:
                        self.estimates.setdefault(_key(near), near)
                better = min(found, key=lambda each: (each.iteration_s, each.layers), default=best)
                if better.iteration_s > 0.999 * best.iteration_s:
                    break
                best = better
                self.estimates.setdefault(_key(best), best)

    def _promising_swaps(self, estimate: Estimate) -> list[Outline]:
        """Swaps that are worth new layers."""
        swaps = list(self._swaps(estimate.outline))
        return swaps if self.effort.keeps_all else self._fastest(swaps, estimate, _SWAPS)

    def _fastest(self, near: Sequence[Outline], estimate: Estimate, most: int) -> list[Outline]:
        """Of outlines with the same groups the fastest, if each group keeps its layers."""
        layers = dict(zip(estimate.outline.teams, estimate.layers, strict=True))
        kept = [self.estimator.estimate(each, [layers[t] for t in each.teams]) for each in near]
        times_s = [math.inf if each is None else each.iteration_s for each in kept]
        ranked = sorted(range(len(near)), key=lambda at: (times_s[at], at))
        return [near[at] for at in ranked[:most]]

    def _swaps(self, outline: Outline) -> Iterator[Outline]:
        """Neighbouring groups exchanged, one group's level a step (or more) up or down."""
        levels = self._levels(LEVELS)
        for group, level in enumerate(outline.levels):
            at = min(range(len(levels)), key=lambda i: abs(levels[i] - _most(level)))
            steps = self.effort.level_steps
            for near in levels[max(0, at - steps) : at + steps + 1]:
                if near != level:
                    yield outline.with_level(group, near)
        yield from _orders_near(outline)

    def _finalists(self, most: int) -> list[Estimate]:
        """The best estimates, of each schedule and number of chunks in turn.

        No more than half of them with one grouping, whatever the sizes and layers.
        """
        queues: dict[Way, list[Estimate]] = {}
        for estimate in sorted(self.estimates.values(), key=lambda e: (e.iteration_s, e.layers)):
            outline = estimate.outline
            queues.setdefault((outline.schedule, outline.num_chunks), []).append(estimate)
        taken: list[Estimate] = []
        per_grouping: dict[object, int] = {}
        turns = zip_longest(*queues.values())
        for estimate in (each for turn in turns for each in turn if each is not None):
            ranks = tuple(team.ranks for team in estimate.outline.teams)
            key = ranks, estimate.outline.schedule
            if per_grouping.get(key, 0) < max(1, most // 2):
                per_grouping[key] = per_grouping.get(key, 0) + 1
                taken.append(estimate)
            if len(taken) == most:
                break
        return taken

    # Simulation.

    def fit(self, estimate: Estimate | None) -> Verdict | None:
        """Simulate, and ask for more free memory where it does not fit, a few times.

        First a part of the batch; the whole of it only where that promises to be the best.
        """
        for _ in range(_FIT_TRIES):
            if estimate is None:
                return None
            preview = self.judge.preview(estimate)
            if preview is not None and not preview.fits:
                estimate = self._reserved(estimate, preview.overflow_bytes)
                continue
            best = best_first(list(self.verdicts.values()))[:1]
            if preview and best and preview.iteration_s > _PROMISING * best[0].iteration_s:
                return None
            verdict = self.judge.judge(estimate)
            if verdict is None:
                estimate = self._reserved(estimate, self.judge.builder.missing_bytes(estimate))
                continue
            if verdict.fits:
                self._note(estimate, verdict)
                return verdict
            estimate = self._reserved(estimate, verdict.overflow_bytes)
        return None

    def _note(self, estimate: Estimate, verdict: Verdict) -> None:
        """Keep a verdict; the whole simulation only of the fastest."""
        fastest = best_first(list(self.verdicts.values()))[:1]
        if fastest and fastest[0].iteration_s <= verdict.iteration_s:
            verdict = replace(verdict, result=None)
        else:
            for key, other in self.verdicts.items():
                self.verdicts[key] = replace(other, result=None)
        self.verdicts.setdefault(_key(estimate), verdict)

    def _reserved(self, estimate: Estimate, overflow: Sequence[int]) -> Estimate | None:
        outline = estimate.outline
        before = outline.reserves or (0,) * len(outline.teams)
        step = max(1, min(self.inputs.capacities_bytes) // 200)
        reserves = tuple(
            reserve + (over + step if over > 0 or not any(o > 0 for o in overflow) else 0)
            for reserve, over in zip(before, overflow, strict=True)
        )
        return self.estimator.estimate(replace(outline, reserves=reserves), estimate.layers)

    # Local search.

    def _improve(self) -> None:
        """Follow the best verdicts to better ones, as long as the budget lasts."""
        tried: set[object] = set()
        while self.judge.num_computations < self.effort.computations:
            ranked = best_first(list(self.verdicts.values()))
            self.report(
                Progress(
                    phase="improving",
                    done=self.judge.num_computations,
                    total=self.effort.computations,
                )
            )
            fresh = next(
                (
                    v
                    for v in ranked[: self.effort.followed]
                    if v.estimate and _key(v.estimate) not in tried
                ),
                None,
            )
            if fresh is None or fresh.estimate is None:
                return
            tried.add(_key(fresh.estimate))
            self._step_from(fresh)

    def _step_from(self, verdict: Verdict) -> None:
        assert verdict.estimate is not None
        here = verdict.estimate
        found: dict[object, Estimate] = {}
        for estimate in self._near(verdict):
            key = _key(estimate)
            if key not in self.verdicts and key not in found:
                found[key] = estimate
        ranked = sorted(found.values(), key=lambda each: (each.iteration_s, each.layers))
        for estimate in ranked[: self.effort.tries]:
            if estimate.iteration_s > self.effort.tolerance * here.iteration_s:
                return
            if self.judge.num_computations >= self.effort.computations:
                return
            better = self.fit(estimate)
            if better is not None and better.iteration_s < 0.998 * verdict.iteration_s:
                return  # go on from there

    def _near(self, verdict: Verdict) -> Iterator[Estimate]:
        """Estimates one step away: memory, levels, order, layers, schedule, grouping."""
        estimate = verdict.estimate
        assert estimate is not None
        outline, layers = estimate.outline, estimate.layers
        near = list(dict.fromkeys(self._near_outlines(outline, verdict)))
        regrouped = [each for each in near if set(each.teams) != set(outline.teams)]
        same = [each for each in near if set(each.teams) == set(outline.teams)]
        if not self.effort.keeps_all:
            same = self._fastest(same, estimate, _NEAR)
        for each in [*same, *regrouped]:
            yield from self.estimator.best(each)
            if len(each.teams) == len(layers):
                kept = self.estimator.estimate(each, layers)
                if kept is not None:
                    yield kept
        for moved in _shifted(layers, 1):
            kept = self.estimator.estimate(outline, moved)
            if kept is not None:
                yield kept

    def _near_outlines(self, outline: Outline, verdict: Verdict) -> Iterator[Outline]:
        free = [-overflow for overflow in verdict.overflow_bytes]
        reserves = outline.reserves or (0,) * len(outline.teams)
        if max(free) > 0 and any(group.recompute for group in verdict.plan.groups):
            yield replace(
                outline,
                reserves=tuple(
                    reserve - max(0, room) for reserve, room in zip(reserves, free, strict=True)
                ),
            )
        levels = self._levels(LEVELS)
        for level in levels:
            yield replace(outline, levels=(level,) * len(outline.teams))
            for group, team in enumerate(outline.teams):
                yield outline.with_level(group, level)
                sizes = self.estimator.stages.sizes(team, outline.levels[group])
                for cell in range(len(sizes)):
                    yield outline.with_level(group, (*sizes[:cell], level, *sizes[cell + 1 :]))
        yield from _orders_near(outline)
        if outline.schedule == "1f1b":
            yield from (replace(outline, slack=each) for each in _SLACKS if each != outline.slack)
        for schedule, chunks in self.ways():
            if (schedule, chunks) != (outline.schedule, outline.num_chunks):
                yield replace(outline, schedule=schedule, num_chunks=chunks, reserves=())
        grouping = tuple(sorted(team.ranks for team in outline.teams))
        for _, candidate in self.groupings.around(grouping, 60)[:6]:
            teams = self._in_order(candidate)
            for level in sorted({_most(level) for level in outline.levels}):
                way = (outline.schedule, outline.num_chunks)
                yield self._outline(teams, level, way, candidate.origin)


def _orders_near(outline: Outline) -> Iterator[Outline]:
    """Two groups that follow one another exchanged."""
    for group in range(len(outline.teams) - 1):
        order = list(range(len(outline.teams)))
        order[group], order[group + 1] = order[group + 1], order[group]
        yield replace(
            outline,
            teams=tuple(outline.teams[index] for index in order),
            levels=tuple(outline.levels[index] for index in order),
            reserves=(),
        )


def _most(level: Level) -> int:
    return max(level) if isinstance(level, tuple) else level


def _key(estimate: Estimate) -> object:
    outline = estimate.outline
    return (
        tuple(team.ranks for team in outline.teams),
        tuple(job.sizes for job in estimate.jobs),
        estimate.extras,
        outline.schedule,
        outline.num_chunks,
        tuple(stage.settings for stage in estimate.stages),
        estimate.layers,
    )


def _shifted(layers: tuple[int, ...], least: int) -> Iterator[tuple[int, ...]]:
    """One layer from one group to another."""
    for source, count in enumerate(layers):
        for target in range(len(layers)):
            if source != target and count > least:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)
