"""The search for the best plan: closed form first, then the simulator decides, within a budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from zorse_megatron.planner.closed_form.candidate import Estimate
from zorse_megatron.planner.evaluate import Evaluation, best_first
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import OnProgress, SearchProgress, SearchStats
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.sources import (
    CandidateSource,
    CostedCandidates,
    PlanKeys,
    batched,
)
from zorse_megatron.planner.search.workers import (
    SearchWorker,
    Workers,
    workers_for,
)

_REFITS = 3  # of a finalist; see `Effort.refits`


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found."""

    evaluations: list[Evaluation]
    """Those that fit, fastest first; the first one with its simulation, where it was asked for."""
    considered: SearchStats

    def __add__(self, other: "SearchResult") -> "SearchResult":
        """Both; of plans that are equally fast those of `self` come first."""
        return SearchResult(
            evaluations=best_first([*self.evaluations, *other.evaluations]),
            considered=self.considered + other.considered,
        )


def search(
    inputs: Inputs,
    on_progress: OnProgress,
    effort: Effort | None = None,
) -> SearchResult:
    """Search for the fastest plan. Raises RuntimeError if the second process fails."""
    effort = effort or Effort.of(inputs)
    with workers_for(inputs, effort, on_progress) as workers:
        return search_with(workers, effort, on_progress)


def search_with(
    workers: Workers,
    effort: Effort,
    on_progress: OnProgress,
    *,
    hopeless_s: float = math.inf,
    least_s: float = math.inf,
) -> SearchResult:
    """The same with workers that may have searched before: what they have costed they know.

    Finalists that are estimated at `hopeless_s` or more are not simulated. The fastest plan comes
    with its simulation if it takes less than `least_s`.
    """
    before = workers.spent
    workers.all_do(partial(SearchWorker.begin_again, effort=effort))
    zorse = ZorseSearch(workers, effort, on_progress, hopeless_s=hopeless_s)
    evaluations = zorse.run()
    if evaluations and evaluations[0].iteration_s < least_s:
        evaluations[0] = zorse.with_simulation(evaluations[0])
    return SearchResult(evaluations=evaluations, considered=workers.spent - before)


class ZorseSearch:
    """One search, which says what its workers do."""

    def __init__(
        self,
        workers: Workers,
        effort: Effort,
        on_progress: OnProgress,
        *,
        hopeless_s: float = math.inf,
    ) -> None:
        """`hopeless_s`: see `search_with`."""
        self.workers = workers
        self.keys = PlanKeys(workers.first.inputs)
        self.hopeless_s = hopeless_s
        self.computations_before = workers.spent.computations
        self.effort = effort
        self.told = SearchProgress(phase="simulating", done=0, total=0)
        """What was reported last."""
        self._report = on_progress
        self.evaluations: dict[object, Evaluation] = {}
        """Each plan once: several estimates may come to the same one."""
        self.fitting: set[object] = set()
        """Keys of the estimates that have been looked at in the simulator, and of those that came
        of them with more memory left free: nothing else would come of them again."""

    def run(self) -> list[Evaluation]:
        """All evaluations that fit, fastest first; empty where nothing does."""
        self._simulate_finalists(self._finalists())
        self._improve()
        return best_first(list(self.evaluations.values()))

    def with_simulation(self, evaluation: Evaluation) -> Evaluation:
        """The fastest evaluation with the simulation that a worker has kept."""
        kept = self.workers.all_do(partial(SearchWorker.simulation_of, plan=evaluation.plan))
        return replace(evaluation, result=next((each for each in kept if each is not None), None))

    def report(self, progress: SearchProgress) -> None:
        """Tell how far the search is."""
        self.told = replace(progress, best=None)
        self._report(progress)

    @property
    def _best_s(self) -> float:
        """Iteration of the fastest plan so far."""
        return min(
            (evaluation.iteration_s for evaluation in self.evaluations.values()), default=math.inf
        )

    @property
    def _computations(self) -> int:
        """Those of this search."""
        return self.workers.spent.computations - self.computations_before

    def _finalists(self) -> list[Estimate]:
        """The best estimates from all sources."""
        if self.workers.number == 1:
            sources: list[tuple[CandidateSource, ...]] = [("groupings", "device orders")]
        else:
            sources = [("device orders",), ("groupings",)]
        costed_candidates = CostedCandidates(
            self.workers.first.estimator, assignments=self.effort.assignments, keys=self.keys
        )
        tasks = [partial(SearchWorker.cost, sources=each) for each in sources]
        for found in self.workers.do(tasks):
            for estimate in found:
                costed_candidates.add(estimate)
        finalists = costed_candidates.finalists(self.effort.finalists)
        return [each for each in finalists if each.iteration_s < self.hopeless_s]

    def _simulate_finalists(self, finalists: Sequence[Estimate]) -> None:
        """By previews, until the budget's part is spent or none can be better."""
        budget = self.effort.finalists_part * self.effort.computations
        ranked: list[tuple[float, int, Estimate]] = []
        for some in batched(enumerate(finalists), self.workers.number):
            self.report(SearchProgress(phase="simulating", done=some[0][0], total=len(finalists)))
            previews = self.workers.do(
                [partial(SearchWorker.preview, estimate=estimate) for _, estimate in some]
            )
            for (number, estimate), preview in zip(some, previews, strict=True):
                value_s = estimate.iteration_s if preview is None else preview.iteration_s
                ranked.append((value_s, number, estimate))
            if self._computations > budget:
                break
        # The closed form leaves out some of the waiting, so it is hardly ever much too long.
        waiting = sorted(ranked, key=lambda row: row[:2])
        while waiting and not (self.evaluations and self._computations > 1.5 * budget):
            self._fit(
                [estimate for _, _, estimate in waiting[: self.workers.number]], refits=_REFITS
            )
            limit_s = self.effort.hopeless * self._best_s
            waiting = [row for row in waiting[self.workers.number :] if row[0] < limit_s]

    def _fit(self, costed_candidates: Sequence[Estimate], *, refits: int) -> list[Evaluation]:
        """Simulate as many as there are workers; returns those that fit."""
        best_s, new = self._best_s, []
        tasks = [
            partial(SearchWorker.fit, estimate=estimate, best_s=best_s, refits=refits)
            for estimate in costed_candidates
        ]
        self.fitting.update(map(self.keys.of, costed_candidates))
        for fitting in self.workers.do(tasks):
            if fitting is not None:
                plan = fitting.evaluation.plan
                new.append(fitting.evaluation)
                self.fitting.add(self.keys.of(fitting.estimate))
                self.evaluations.setdefault(
                    (plan.groups, plan.chunks, plan.schedule), fitting.evaluation
                )
        if new:
            fastest = min(new, key=lambda each: each.iteration_s)
            self.report(replace(self.told, best=fastest))
        return new

    # Local search.

    def _improve(self) -> None:
        """Follow the best evaluations to better ones, as long as the budget lasts."""
        tried: set[object] = set()
        most = self.effort.computations
        while self._computations < most:
            ranked = best_first(list(self.evaluations.values()))
            self.report(SearchProgress(phase="improving", done=self._computations, total=most))
            fresh = next(
                (
                    v
                    for v in ranked[: self.effort.followed]
                    if v.estimate and self.keys.of(v.estimate) not in tried
                ),
                None,
            )
            if fresh is None or fresh.estimate is None:
                return
            tried.add(self.keys.of(fresh.estimate))
            self._step_from(fresh)

    def _step_from(self, evaluation: Evaluation) -> None:
        assert evaluation.estimate is not None
        here = evaluation.estimate
        found: dict[object, Estimate] = {}
        for estimate in self.workers.first.local_moves.around(evaluation):
            key = self.keys.of(estimate)
            if key not in self.fitting and key not in found:
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
            if any(new.iteration_s < 0.998 * evaluation.iteration_s for new in found_now):
                return  # go on from there
