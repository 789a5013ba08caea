"""The search for the best plan: groupings, schedules, orders, sizes; then the simulator decides."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from zorse_megatron.planner.effort import LEVELS, Effort
from zorse_megatron.planner.estimate import Estimator
from zorse_megatron.planner.estimates import Estimates, key_of
from zorse_megatron.planner.groupings import Groupings
from zorse_megatron.planner.inputs import Inputs
from zorse_megatron.planner.jobs import Level
from zorse_megatron.planner.judge import Judge, Verdict, best_first
from zorse_megatron.planner.outcome import Progress
from zorse_megatron.planner.outline import Estimate, Outline
from zorse_megatron.planner.sources import Source, Sources
from zorse_megatron.planner.teams import Teams

_SLACKS = (0.0, 0.5, 1.0, 1.5, 2.0)
_POLISHING_STEPS = 6
# Of one step's outlines that are priced with the best layers, while polishing and behind it.
_SWAPS, _NEAR = 6, 60
_HOPELESS = 1.03  # estimates so much longer than a simulated iteration are not simulated
_PROMISING = 1.005  # previews so much longer than a simulated iteration are left at that
_FIT_TRIES = 4
_FINALISTS_PART = 0.6  # of the simulations; the rest is for the local search


class ZorseSearch:
    """One search."""

    def __init__(
        self, inputs: Inputs, effort: Effort, on_progress: Callable[[Progress], None]
    ) -> None:
        self.inputs = inputs
        self.report = on_progress
        self.effort = effort
        self.estimator = Estimator(inputs)
        self.groupings = Groupings(self.estimator, Teams(inputs))
        self.judge = Judge(inputs, self.estimator)
        self.verdicts: dict[object, Verdict] = {}
        self.estimates = Estimates(self.estimator, layouts=effort.layouts)
        self.sources = Sources(
            inputs=inputs,
            effort=effort,
            estimator=self.estimator,
            estimates=self.estimates,
            teams=self.groupings.teams,
            groupings=self.groupings,
            report=on_progress,
        )

    def run(self, sources: Sequence[Source]) -> list[Verdict]:
        """All verdicts that fit, fastest first; empty where nothing does."""
        for source in sources:
            self.sources.price(source)
        self._polish()
        self._simulate_finalists()
        self._improve()
        return best_first(list(self.verdicts.values()))

    def _simulate_finalists(self) -> None:
        """The best estimates, by previews, until the budget's part is spent or none is better."""
        budget = _FINALISTS_PART * self.effort.computations
        ranked: list[tuple[float, int, Estimate]] = []
        finalists = self.estimates.finalists(self.effort.finalists)
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

    def _polish(self) -> None:
        """Better levels and orders for the best estimates, by closed form."""
        for estimate in self.estimates.finalists(self.effort.polished):
            best = estimate
            for _ in range(_POLISHING_STEPS):
                found = [
                    near
                    for each in self._promising_swaps(best)
                    for near in self.estimator.best(each)
                ]
                if self.effort.keeps_all:
                    for near in found:
                        self.estimates.add(near)
                better = min(found, key=lambda each: (each.iteration_s, each.layers), default=best)
                if better.iteration_s > 0.999 * best.iteration_s:
                    break
                best = better
                self.estimates.add(best)

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
        levels = self.sources.levels(LEVELS)
        for group, level in enumerate(outline.levels):
            at = min(range(len(levels)), key=lambda i: abs(levels[i] - _most(level)))
            steps = self.effort.level_steps
            for near in levels[max(0, at - steps) : at + steps + 1]:
                if near != level:
                    yield outline.with_level(group, near)
        yield from _orders_near(outline)

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
        self.verdicts.setdefault(key_of(estimate), verdict)

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
                    if v.estimate and key_of(v.estimate) not in tried
                ),
                None,
            )
            if fresh is None or fresh.estimate is None:
                return
            tried.add(key_of(fresh.estimate))
            self._step_from(fresh)

    def _step_from(self, verdict: Verdict) -> None:
        assert verdict.estimate is not None
        here = verdict.estimate
        found: dict[object, Estimate] = {}
        for estimate in self._near(verdict):
            key = key_of(estimate)
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
        levels = self.sources.levels(LEVELS)
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
        for schedule, chunks in self.sources.ways():
            if (schedule, chunks) != (outline.schedule, outline.num_chunks):
                yield replace(outline, schedule=schedule, num_chunks=chunks, reserves=())
        grouping = tuple(sorted(team.ranks for team in outline.teams))
        for _, candidate in self.groupings.around(grouping, 60)[:6]:
            teams = self.sources.in_order(candidate)
            for level in sorted({_most(level) for level in outline.levels}):
                way = (outline.schedule, outline.num_chunks)
                yield self.sources.outline(teams, level, way, candidate.origin)


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


def _shifted(layers: tuple[int, ...], least: int) -> Iterator[tuple[int, ...]]:
    """One layer from one group to another."""
    for source, count in enumerate(layers):
        for target in range(len(layers)):
            if source != target and count > least:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)
