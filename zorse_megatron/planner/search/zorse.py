"""The search for the best plan: closed form first, then the simulator decides."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.planner.closed_form.candidate import Estimate
from zorse_megatron.planner.evaluate.evaluator import Verdict, best_first
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import Considered, Progress
from zorse_megatron.planner.search.batched import batched
from zorse_megatron.planner.search.costed import Estimates, key_of
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.worker import Fit, HandOver, Look, Price
from zorse_megatron.planner.search.workers import Workers, workers_for

_REFITS = 3  # of a finalist; see `Effort.refits`


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found."""

    verdicts: list[Verdict]
    """Those that fit, fastest first; the first one with its simulation."""
    considered: Considered


def search(inputs: Inputs, on_progress: Callable[[Progress], None]) -> Found:
    """Search for the fastest plan. Raises RuntimeError if the second process fails."""
    effort = Effort.of(inputs)
    with workers_for(inputs, effort, on_progress) as workers:
        zorse = ZorseSearch(workers, effort, on_progress)
        verdicts = zorse.run()
        if verdicts:
            verdicts[0] = zorse.with_simulation(verdicts[0])
        spent = workers.spent
    considered = Considered(
        groupings=spent.groupings, estimated=spent.estimated, simulated=spent.simulated
    )
    return Found(verdicts=verdicts, considered=considered)


class ZorseSearch:
    """One search, which says what its workers do."""

    def __init__(
        self, workers: Workers, effort: Effort, on_progress: Callable[[Progress], None]
    ) -> None:
        self.workers = workers
        self.effort = effort
        self.report = on_progress
        self.verdicts: dict[object, Verdict] = {}
        """Each plan once: several estimates may come to the same one."""
        self.fitted: set[object] = set()
        """Keys of the estimates that have been simulated and fit."""

    def run(self) -> list[Verdict]:
        """All verdicts that fit, fastest first; empty where nothing does."""
        self._simulate_finalists(self._finalists())
        self._improve()
        return best_first(list(self.verdicts.values()))

    def with_simulation(self, verdict: Verdict) -> Verdict:
        """The fastest verdict with the simulation that a worker has kept."""
        kept = self.workers.all_do(HandOver(verdict.plan))
        return replace(verdict, result=next((each for each in kept if each is not None), None))

    @property
    def _best_s(self) -> float:
        """Iteration of the fastest plan so far."""
        return min((verdict.iteration_s for verdict in self.verdicts.values()), default=math.inf)

    @property
    def _computations(self) -> int:
        return self.workers.spent.computations

    def _finalists(self) -> list[Estimate]:
        """The best estimates from all sources."""
        if self.workers.number == 1:
            tasks = [Price(("groupings", "lines"))]
        else:
            tasks = [Price(("lines",)), Price(("groupings",))]
        estimates = Estimates(self.workers.first.estimator, layouts=self.effort.layouts)
        for found in self.workers.do(tasks):
            for estimate in found:
                estimates.add(estimate)
        return estimates.finalists(self.effort.finalists)

    def _simulate_finalists(self, finalists: Sequence[Estimate]) -> None:
        """By previews, until the budget's part is spent or none can be better."""
        budget = self.effort.finalists_part * self.effort.computations
        ranked: list[tuple[float, int, Estimate]] = []
        for some in batched(enumerate(finalists), self.workers.number):
            self.report(Progress(phase="simulating", done=some[0][0], total=len(finalists)))
            previews = self.workers.do([Look(estimate) for _, estimate in some])
            for (number, estimate), preview in zip(some, previews, strict=True):
                value_s = estimate.iteration_s if preview is None else preview.iteration_s
                ranked.append((value_s, number, estimate))
            if self._computations > budget:
                break
        # The closed form leaves out some of the waiting, so it is hardly ever much too long.
        waiting = sorted(ranked, key=lambda row: row[:2])
        while waiting and not (self.verdicts and self._computations > 1.5 * budget):
            self._fit(
                [estimate for _, _, estimate in waiting[: self.workers.number]], refits=_REFITS
            )
            limit_s = self.effort.hopeless * self._best_s
            waiting = [row for row in waiting[self.workers.number :] if row[0] < limit_s]

    def _fit(self, estimates: Iterable[Estimate], *, refits: int) -> list[Verdict]:
        """Simulate as many as there are workers; returns those that fit."""
        best_s, new = self._best_s, []
        for fitted in self.workers.do([Fit(estimate, best_s, refits) for estimate in estimates]):
            if fitted is not None:
                plan = fitted.verdict.plan
                new.append(fitted.verdict)
                self.fitted.add(key_of(fitted.estimate))
                self.verdicts.setdefault((plan.groups, plan.chunks, plan.schedule), fitted.verdict)
        return new

    # Local search.

    def _improve(self) -> None:
        """Follow the best verdicts to better ones, as long as the budget lasts."""
        tried: set[object] = set()
        most = self.effort.computations
        while self._computations < most:
            ranked = best_first(list(self.verdicts.values()))
            self.report(Progress(phase="improving", done=self._computations, total=most))
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
        for estimate in self.workers.first.neighbours.around(verdict):
            key = key_of(estimate)
            if key not in self.fitted and key not in found:
                found[key] = estimate
        ranked = sorted(found.values(), key=lambda each: (each.iteration_s, each.layers))
        hopeful = [
            estimate
            for estimate in ranked[: self.effort.tries]
            if estimate.iteration_s <= self.effort.tolerance * here.iteration_s
        ]
        for some in batched(hopeful, self.workers.number):
            if self._computations >= self.effort.computations:
                return
            found_now = self._fit(some, refits=self.effort.refits)
            if any(new.iteration_s < 0.998 * verdict.iteration_s for new in found_now):
                return  # go on from there
