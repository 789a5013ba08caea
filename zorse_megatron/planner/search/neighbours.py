"""Plans one step away from a given one: order, levels, memory, layers, schedule, grouping."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.planner.closed_form.candidate import Estimate, Outline
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.stage import Level
from zorse_megatron.planner.evaluate.evaluator import Verdict
from zorse_megatron.planner.search.effort import LEVELS, Effort
from zorse_megatron.planner.search.sources import Sources

_SLACKS = (0.0, 0.5, 1.0, 1.5, 2.0)
# Of one step's outlines that are priced with the best layers, while polishing and behind it.
_SWAPS, _NEAR = 6, 60


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Finds neighbours of plans."""

    effort: Effort
    estimator: Estimator
    sources: Sources

    def promising_swaps(self, estimate: Estimate) -> list[Outline]:
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

    def around(self, verdict: Verdict) -> Iterator[Estimate]:
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
        for _, candidate in self.sources.groupings.around(grouping, 60)[:6]:
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
