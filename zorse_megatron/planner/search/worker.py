"""One search process: costs candidates in closed form and simulates them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from zorse_megatron.planner.closed_form.candidate import Estimate
from zorse_megatron.planner.closed_form.device_groups import Team, Teams
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.stage_costs import StagePrice
from zorse_megatron.planner.evaluate.evaluator import Judge, Preview, Verdict
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import Progress
from zorse_megatron.planner.search.costed import Estimates
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.groupings import Groupings
from zorse_megatron.planner.search.neighbours import Neighbours
from zorse_megatron.planner.search.sources import Source, Sources
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.result import SimulationResult

_POLISHING_STEPS = 6
_PROMISING = 1.005  # previews so much longer than a simulated iteration are left at that

T_co = TypeVar("T_co", covariant=True)


class Task(Protocol[T_co]):
    """A unit of work for a worker, in this process or another."""

    def run(self, worker: "Worker") -> T_co:
        """Run the task on `worker` and return its result."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What workers have done so far."""

    groupings: int = 0
    estimated: int = 0
    simulated: int = 0
    computations: int = 0
    """Forwards and backwards that were simulated."""

    def __add__(self, other: "Spent") -> "Spent":
        """The sum of both."""
        return Spent(
            groupings=self.groupings + other.groupings,
            estimated=self.estimated + other.estimated,
            simulated=self.simulated + other.simulated,
            computations=self.computations + other.computations,
        )


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A plan that fits, perhaps with more memory left free than was asked for at first."""

    estimate: Estimate
    verdict: Verdict
    """Without its simulation."""


class Worker:
    """Prices and simulates; what has been found once is not computed again."""

    def __init__(
        self, inputs: Inputs, effort: Effort, on_progress: Callable[[Progress], None]
    ) -> None:
        self.inputs = inputs
        self.effort = effort
        self.estimator = Estimator(inputs)
        self.judge = Judge(inputs, self.estimator)
        self.estimates = Estimates(self.estimator, layouts=effort.layouts)
        teams = Teams(inputs)
        self.sources = Sources(
            inputs=inputs,
            effort=effort,
            estimator=self.estimator,
            estimates=self.estimates,
            teams=teams,
            groupings=Groupings(self.estimator, teams),
            report=on_progress,
        )
        self.neighbours = Neighbours(effort=effort, estimator=self.estimator, sources=self.sources)
        self._fastest: Verdict | None = None

    @property
    def spent(self) -> Spent:
        """Work done so far."""
        return Spent(
            groupings=len(self.sources.groupings.seen),
            estimated=self.estimator.num_estimated,
            simulated=self.judge.num_simulated,
            computations=self.judge.num_computations,
        )

    # Closed form.

    def price(self, sources: Sequence[Source]) -> list[Estimate]:
        """The best of what comes from these sources, polished."""
        for source in sources:
            self.sources.price(source)
        self._polish()
        return self.estimates.finalists(self.effort.finalists)

    def _polish(self) -> None:
        """Better levels and orders for the best estimates."""
        for estimate in self.estimates.finalists(self.effort.polished):
            best = estimate
            for _ in range(_POLISHING_STEPS):
                found = [
                    near
                    for each in self.neighbours.promising_swaps(best)
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

    # Simulation.

    def fit(self, estimate: Estimate | None, best_s: float, *, refits: int) -> Fitted | None:
        """Simulate, and ask for more free memory where it does not fit, a few times.

        First a part of the batch; the whole of it only where that may be faster than `best_s`.
        """
        for _ in range(1 + refits):
            if estimate is None:
                return None
            preview = self.judge.preview(estimate)
            if preview is not None and not preview.fits:
                estimate = self._reserved(estimate, preview.overflow_bytes)
                continue
            if preview is not None and preview.iteration_s > _PROMISING * best_s:
                return None
            verdict = self.judge.judge(estimate)
            if verdict is None:
                estimate = self._reserved(estimate, self.judge.builder.missing_bytes(estimate))
                continue
            if verdict.fits:
                self._keep(verdict)
                return Fitted(estimate=estimate, verdict=replace(verdict, result=None))
            estimate = self._reserved(estimate, verdict.overflow_bytes)
        return None

    def _keep(self, verdict: Verdict) -> None:
        """A simulation holds every task of it, so only one is kept."""
        least_s = self._fastest.iteration_s if self._fastest else math.inf
        if verdict.iteration_s < least_s:
            self._fastest = verdict

    def simulation_of(self, plan: Plan) -> SimulationResult | None:
        """The simulation of the fastest plan that fitted, if it is this one."""
        if self._fastest is None or self._fastest.plan != plan:
            return None
        return self._fastest.result

    def _reserved(self, estimate: Estimate, overflow: Sequence[int]) -> Estimate | None:
        """The same with more memory left free in the groups that have too little."""
        outline = estimate.outline
        before = outline.reserves or (0,) * len(outline.teams)
        step = max(1, min(self.inputs.capacities_bytes) // 200)
        more = [
            over + _believed_bytes(stage, team) if over > 0 else 0
            for over, stage, team in zip(overflow, estimate.stages, outline.teams, strict=True)
        ]
        nowhere = not any(more)
        reserves = tuple(
            reserve + each + step if each or nowhere else reserve
            for reserve, each in zip(before, more, strict=True)
        )
        return self.estimator.estimate(replace(outline, reserves=reserves), estimate.layers)


def _believed_bytes(stage: StagePrice, team: Team) -> int:
    """What the closed form took to be free on each GPU, where all of a team are equal.

    With less than that as a reserve it would give the same settings again.
    """
    return int(stage.free_bytes) // len(team.ranks) if len(team.cells) == 1 else 0


@dataclass(frozen=True)
class Price:
    """See `Worker.price`."""

    sources: tuple[Source, ...]

    def run(self, worker: Worker) -> list[Estimate]:
        """Estimate the sources."""
        return worker.price(self.sources)


@dataclass(frozen=True)
class Look:
    """See `Judge.preview`."""

    estimate: Estimate

    def run(self, worker: Worker) -> Preview | None:
        """Simulate part of the batch."""
        return worker.judge.preview(self.estimate)


@dataclass(frozen=True)
class Fit:
    """See `Worker.fit`."""

    estimate: Estimate
    best_s: float
    refits: int

    def run(self, worker: Worker) -> Fitted | None:
        """Simulate, with more free memory where it does not fit."""
        return worker.fit(self.estimate, self.best_s, refits=self.refits)


@dataclass(frozen=True)
class HandOver:
    """See `Worker.simulation_of`."""

    plan: Plan

    def run(self, worker: Worker) -> SimulationResult | None:
        """Return the simulation of the plan, if it is the fastest so far."""
        return worker.simulation_of(self.plan)
