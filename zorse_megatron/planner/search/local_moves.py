"""Plans one step away from a given one: order, levels, memory, layers, schedule, grouping."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.plan.memory_settings import recomputes_anything, without_recompute
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import MicroBatchLevel
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, computations
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.search.effort import LEVELS, Effort
from zorse_megatron.planner.search.sources import Sources
from zorse_megatron.simulate.result import SimulationResult

_SLACKS = (0.0, 0.5, 1.0, 1.5, 2.0)
# Of one step's candidates that are costed with the best layers, while polishing and after it.
_SWAPS, _NEAR = 6, 60


@dataclass(frozen=True, kw_only=True)
class LocalMoves:
    """Finds neighbours of plans."""

    effort: Effort
    estimator: Estimator
    sources: Sources

    def promising_swaps(self, estimate: Estimate) -> list[Candidate]:
        """Swaps that are worth new layers."""
        swaps = list(self._swaps(estimate.candidate))
        return swaps if self.effort.keeps_all else self._fastest(swaps, estimate, _SWAPS)

    def _fastest(self, near: Sequence[Candidate], estimate: Estimate, most: int) -> list[Candidate]:
        """The fastest candidates of the same groups, if each group keeps its layers."""
        layers = dict(zip(estimate.candidate.device_groups, estimate.layers, strict=True))
        kept = [
            self.estimator.estimate(each, [layers[t] for t in each.device_groups]) for each in near
        ]
        times_s = [math.inf if each is None else each.iteration_s for each in kept]
        ranked = sorted(range(len(near)), key=lambda at: (times_s[at], at))
        return [near[at] for at in ranked[:most]]

    def _swaps(self, candidate: Candidate) -> Iterator[Candidate]:
        """Neighbouring groups exchanged, one group's level a step (or more) up or down."""
        levels = self.sources.levels(LEVELS)
        for group, level in enumerate(candidate.levels):
            at = min(range(len(levels)), key=lambda i: abs(levels[i] - _most(level)))
            steps = self.effort.level_steps
            for near in levels[max(0, at - steps) : at + steps + 1]:
                if near != level:
                    yield candidate.with_level(group, near)
        yield from _orders_near(candidate)

    def around(self, evaluation: Evaluation) -> Iterator[Estimate]:
        """Estimates one step away: memory, levels, order, layers, schedule, grouping."""
        estimate = evaluation.estimate
        assert estimate is not None
        candidate, layers = estimate.candidate, estimate.layers
        near = list(dict.fromkeys(self._near_candidates(candidate, evaluation)))
        regrouped = [
            each for each in near if set(each.device_groups) != set(candidate.device_groups)
        ]
        same = [each for each in near if set(each.device_groups) == set(candidate.device_groups)]
        if not self.effort.keeps_all:
            same = self._fastest(same, estimate, _NEAR)
        for each in [*same, *regrouped]:
            yield from self.estimator.best(each)
            if len(each.device_groups) == len(layers):
                kept = self.estimator.estimate(each, layers)
                if kept is not None:
                    yield kept
        for moved in _shifted(layers, 1):
            kept = self.estimator.estimate(candidate, moved)
            if kept is not None:
                yield kept

    def _near_candidates(self, candidate: Candidate, evaluation: Evaluation) -> Iterator[Candidate]:
        free = [-overflow for overflow in evaluation.overflow_bytes]
        reserves = candidate.reserves or (0,) * len(candidate.device_groups)
        if max(free) > 0 and recomputes_anything(evaluation.plan):
            yield replace(
                candidate,
                reserves=tuple(
                    reserve - max(0, room) for reserve, room in zip(reserves, free, strict=True)
                ),
            )
        levels = self.sources.levels(LEVELS)
        for level in levels:
            yield replace(candidate, levels=(level,) * len(candidate.device_groups))
            for group, device_group in enumerate(candidate.device_groups):
                yield candidate.with_level(group, level)
                sizes = self.estimator.cost_model.sizes(device_group, candidate.levels[group])
                for gpu_class in range(len(sizes)):
                    yield candidate.with_level(
                        group, (*sizes[:gpu_class], level, *sizes[gpu_class + 1 :])
                    )
        yield from _orders_near(candidate)
        if candidate.schedule == "1f1b":
            yield from (
                replace(candidate, slack=each) for each in _SLACKS if each != candidate.slack
            )
        for schedule, chunks in self.sources.ways(len(candidate.device_groups)):
            if (schedule, chunks) != (candidate.schedule, candidate.num_chunks):
                yield replace(candidate, schedule=schedule, num_chunks=chunks, reserves=())
        grouping = tuple(sorted(device_group.ranks for device_group in candidate.device_groups))
        for _, proposal in self.sources.groupings.around(grouping, 60)[:6]:
            device_groups = self.sources.in_order(proposal)
            for level in sorted({_most(level) for level in candidate.levels}):
                way = (candidate.schedule, candidate.num_chunks)
                yield self.sources.candidate(device_groups, level, way)


def _orders_near(candidate: Candidate) -> Iterator[Candidate]:
    """Two groups that follow one another exchanged."""
    for group in range(len(candidate.device_groups) - 1):
        order = list(range(len(candidate.device_groups)))
        order[group], order[group + 1] = order[group + 1], order[group]
        yield replace(
            candidate,
            device_groups=tuple(candidate.device_groups[index] for index in order),
            levels=tuple(candidate.levels[index] for index in order),
            reserves=(),
        )


def _most(level: MicroBatchLevel) -> int:
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


# Small changes of a plan: what `zorse explain` shows beside it, and where the search ends.
#
# Where one of them is faster and fits, the search takes it and looks again, so that no alternative
# that is shown beats the plan that was chosen.


_MOST_SIMULATED = 24
# Forwards and backwards of a plan beyond which it is left as it is: simulating its changes would
# take longer than the search. With `--effort high` three times as many.
_MOST_COMPUTATIONS = 20_000


def with_changes(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """Take the fastest small change that fits, as long as one is faster: at most 24 simulations.

    A plan whose time was extrapolated stays as it is: it would have to be simulated in full.
    """
    inputs, last = evaluator.inputs, evaluator.num_simulated + _MOST_SIMULATED
    most = _MOST_COMPUTATIONS * (3 if inputs.space.effort == "high" else 1)
    if best.is_extrapolated or computations(best.plan) > most:
        return best
    while evaluator.num_simulated < last:
        result = best.result or evaluator.simulated(best.plan)
        assert result is not None, "the plan has been simulated before"
        here = replace(best, result=result)
        found = [evaluator.evaluate_plan(other) for _, other in changes(inputs, best.plan, result)]
        fitting = [each for each in found if each is not None and each.fits]
        best = min([here, *fitting], key=lambda each: each.iteration_s)
        if best is here:
            break
    return best


def changes(inputs: Inputs, plan: Plan, result: SimulationResult) -> Iterator[tuple[str, Plan]]:
    """Yield (what, plan): no recomputation, and a layer less in the busiest group.

    `result`: of the plan. What is yielded may break the plan file's rules, or not fit.
    """
    if recomputes_anything(plan) and "none" in inputs.space.recompute:
        yield "no recomputation", without_recompute(plan)
    if len(plan.chunks) != len(plan.groups):
        return
    busiest = busiest_group(plan, result)
    chunks = plan.chunks
    at = next(index for index, chunk in enumerate(chunks) if chunk.group == busiest)
    first, stop = chunks[at].layers
    if stop - first < 2:
        return
    if at > 0:
        cuts = {at - 1: (chunks[at - 1].layers[0], first + 1), at: (first + 1, stop)}
        yield f"one layer from group {busiest} to the one before", _cut(plan, cuts)
    if at + 1 < len(chunks):
        cuts = {at: (first, stop - 1), at + 1: (stop - 1, chunks[at + 1].layers[1])}
        yield f"one layer from group {busiest} to the next one", _cut(plan, cuts)


def busiest_group(plan: Plan, result: SimulationResult) -> int:
    """The group whose ranks compute for the largest part of the iteration."""
    busy = [
        sum(result.usage[rank].busy_s for rank in group.ranks) / len(group.ranks)
        for group in plan.groups
    ]
    return max(range(len(busy)), key=busy.__getitem__)


def _cut(plan: Plan, layers: dict[int, tuple[int, int]]) -> Plan:
    """The plan with other layers in some chunks."""
    chunks = (
        replace(chunk, layers=layers.get(at, chunk.layers)) for at, chunk in enumerate(plan.chunks)
    )
    return replace(plan, chunks=tuple(chunks))
