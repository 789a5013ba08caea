"""Evaluates candidates in the simulator: iteration time, and whether they fit in memory."""

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from zorse_megatron.errors import PlanError
from zorse_megatron.plan.memory_settings import offloads_anything
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.planner.build_plan import Builder
from zorse_megatron.planner.closed_form.candidate import Estimate
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.simulate_plan import NodeHostMemory, extended, host_needs, simulate_plan
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.validate import executes_in_order
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.result import SimulationResult

# Computations of one simulation beyond which a shorter batch is simulated twice instead.
MOST_COMPUTATIONS = 60_000
# A shorter batch is so many times what is in flight at most, so that fill and drain are complete.
_ROUNDS = 4
# Parts of a batch that may stand for it, smallest first, if they are so many times what is in
# flight.
_PARTS = (8, 4)
_TIMES_IN_FLIGHT = 2
# Of what more samples take to compute, how much they must add to an iteration at least, that more
# still are taken to do the same.
_STEADY = 0.98


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A plan and what the simulator says."""

    estimate: Estimate | None
    plan: Plan
    result: SimulationResult | None
    """None where it was dropped to save memory."""
    iteration_s: float
    peaks_bytes: tuple[int, ...]
    """Rank -> highest memory."""
    overflow_bytes: tuple[int, ...]
    """Group -> most that one of its units has too much, below 0 where all fit."""
    host: tuple[NodeHostMemory, ...] = ()
    """Nodes in whose memory something waits, of those whose memory is known."""
    is_extrapolated: bool = False

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within its capacity, and what is offloaded in its node's."""
        return self.fits_gpus and not any(need.missing_bytes for need in self.host)

    @property
    def fits_gpus(self) -> bool:
        """Whether every rank's peak is within its capacity."""
        return all(overflow <= 0 for overflow in self.overflow_bytes)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a simulation of a part of the batch lets expect."""

    iteration_s: float
    overflow_bytes: tuple[int, ...]
    """As in `Evaluation`."""

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within its capacity."""
        return all(overflow <= 0 for overflow in self.overflow_bytes)


class Evaluator:
    """Simulates plans and remembers the evaluations."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.estimator = Estimator(inputs)
        self.builder = Builder(self.estimator)
        self.num_simulated = 0
        self.num_computations = 0
        """Forwards and backwards simulated so far: the search's budget is counted in them."""
        self._evaluations: dict[object, Evaluation | None] = {}
        self._with_batch: dict[int, Evaluator] = {}
        self._previews: dict[object, Preview | None] = {}

    def evaluate(self, estimate: Estimate) -> Evaluation | None:
        """Simulate an estimate's plan; None where no plan can be made of it."""
        plan = self.builder.plan(estimate)
        if plan is None:
            return None
        return self.evaluate_plan(plan, estimate)

    def preview(self, estimate: Estimate) -> Preview | None:
        """Simulate a part of the batch: a few times what is in flight at most, where that is less.

        What the part took beyond filling, draining and the last reduction, over what its busiest
        rank computed, is taken to be the same for the whole batch. None where the part would not
        be much shorter, or no plan can be made.
        """
        size = self._part_of_batch(estimate)
        if size is None:
            return None
        key = (size, estimate.candidate, estimate.layers)
        if key not in self._previews:
            self._previews[key] = self._previewed(estimate, self._shortened(estimate, size))
        return self._previews[key]

    def _shortened(self, estimate: Estimate, batch: int) -> Evaluation | None:
        """The same candidate, layers and settings; only the batch is shorter."""
        if batch not in self._with_batch:
            self._with_batch[batch] = Evaluator(replace(self.inputs, global_batch_size=batch))
        shorter = self._with_batch[batch]
        plan = shorter.builder.plan(estimate)
        if plan is None:
            return None
        self.num_simulated += 1
        self.num_computations += computations(plan)
        return shorter.whole(plan, None)

    def _part_of_batch(self, estimate: Estimate) -> int | None:
        batch = self.inputs.global_batch_size
        if estimate.candidate.schedule == "breadth_first":
            return None
        in_flight = max(stage.position.in_flight_limit for stage in estimate.stages)
        parts = [part for part in _PARTS if batch // part >= _TIMES_IN_FLIGHT * in_flight]
        return batch // parts[0] if parts else None

    def _previewed(self, estimate: Estimate, short: Evaluation | None) -> Preview | None:
        if short is None or short.result is None:
            return None
        once_s = min(estimate.fill_s + estimate.tail_s, short.iteration_s)
        steady = (short.iteration_s - once_s) / short.result.most_busy_s
        return Preview(
            iteration_s=once_s + steady * estimate.busy_s, overflow_bytes=short.overflow_bytes
        )

    def evaluate_plan(self, plan: Plan, estimate: Estimate | None = None) -> Evaluation | None:
        """Simulate a plan; None where it breaks the plan file's rules or cannot be lowered."""
        key = plan_key(plan)
        if key not in self._evaluations:
            evaluation = self._evaluated(plan, estimate)
            # A result holds every task of the simulation: only the newest one is handed out.
            self._evaluations[key] = (
                None if evaluation is None else replace(evaluation, result=None)
            )
            return evaluation
        return self._evaluations[key]

    def faster(self, best: Evaluation, other: Plan) -> Evaluation:
        """That of the other plan where it fits and is faster; else the best."""
        found = self.evaluate_plan(other)
        is_better = found is not None and found.fits and found.iteration_s < best.iteration_s
        return found if found is not None and is_better else best

    def _evaluated(self, plan: Plan, estimate: Estimate | None) -> Evaluation | None:
        if problems_of(plan) or not self._is_in_time(plan):
            return None
        if computations(plan) > MOST_COMPUTATIONS and estimate is not None:
            short = self._extrapolated(plan, estimate)
            if short is not None:
                return short
        return self.whole(plan, estimate)

    def _is_in_time(self, plan: Plan) -> bool:
        """Whether experts' loads are known where backwards need them, if they do."""
        if not self.inputs.space.needs_loads_in_order:
            return True
        with suppress(PlanError):
            return executes_in_order(plan, lower_plan(plan))
        return False

    def whole(self, plan: Plan, estimate: Estimate | None = None) -> Evaluation | None:
        """Simulate all of the batch, however long; None where the plan cannot be lowered."""
        result = self.simulated(plan)
        if result is None:
            return None
        return self._evaluation(plan, estimate, result, result.iteration_s)

    def simulated(self, plan: Plan) -> SimulationResult | None:
        """Simulate a plan; None where it cannot be lowered."""
        self.num_simulated += 1
        self.num_computations += computations(plan)
        with gc_paused():
            try:
                return simulate_plan(self.inputs.members.base, plan, merge_equal_ranks=True)
            except (PlanError, SimulationError):
                return None

    def _extrapolated(self, plan: Plan, estimate: Estimate) -> Evaluation | None:
        """Two shorter batches, and a straight line through their times.

        None where collectives, which take as long whatever the batch, still hide computations of
        the longer one: the line would be too flat.
        """
        batch = self.inputs.global_batch_size
        rounds = max(
            sum(r.micro_batch_size for r in group.replicas if r.num_microbatches)
            for group in plan.groups
        )
        first = _ROUNDS * rounds * max(1, len(plan.groups) // 2)
        while 3 * first <= batch:
            found = self._line_through(plan, estimate, first)
            if found is not None:
                return found
            first *= 2
        return None

    def _line_through(self, plan: Plan, estimate: Estimate, first: int) -> Evaluation | None:
        """The line through the times of `first` samples and of twice as many."""
        batch = self.inputs.global_batch_size
        evaluations = []
        for size in (first, 2 * first):
            evaluation = self._shortened(estimate, size)
            if evaluation is None:
                return None
            evaluations.append(evaluation)
        one, two = evaluations
        assert one.result is not None and two.result is not None, "they were simulated just now"
        computed_s = two.result.most_busy_s - one.result.most_busy_s
        if two.iteration_s - one.iteration_s < _STEADY * computed_s:
            return None
        slope = (two.iteration_s - one.iteration_s) / first
        iteration_s = two.iteration_s + slope * (batch - 2 * first)
        return replace(
            self._evaluation(plan, estimate, two.result, iteration_s),
            host=extended(one.host, two.host, batch / first),
            is_extrapolated=True,
        )

    def _evaluation(
        self,
        plan: Plan,
        estimate: Estimate | None,
        result: SimulationResult,
        iteration_s: float,
    ) -> Evaluation:
        with gc_paused():
            peaks = result.peak_memory_bytes
        return Evaluation(
            estimate=estimate,
            plan=plan,
            result=result,
            iteration_s=iteration_s,
            peaks_bytes=peaks,
            overflow_bytes=tuple(
                max(self._overflow_bytes(rank, peaks[rank]) for rank in group.ranks)
                for group in plan.groups
            ),
            host=self._host_needs(plan, result),
        )

    def _host_needs(self, plan: Plan, result: SimulationResult) -> tuple[NodeHostMemory, ...]:
        inputs = self.inputs.members.base
        is_known = any(host is not None for host in inputs.host_bytes)
        return host_needs(inputs, result) if is_known and offloads_anything(plan) else ()

    def _overflow_bytes(self, rank: int, peak_bytes: int) -> int:
        """What a rank has too much, of its unit as that is counted."""
        members = self.inputs.members
        return math.ceil((peak_bytes - members.base.capacities_bytes[rank]) / members.share(rank))


def plan_key(plan: Plan) -> object:
    """Equal for plans that take as long, of those for one cluster, model and batch."""
    return plan.groups, plan.chunks, plan.schedule.name


def computations(plan: Plan) -> int:
    """Forwards and backwards of a plan."""
    per_group = [
        sum(replica.num_microbatches for replica in group.replicas) for group in plan.groups
    ]
    return 2 * sum(per_group[chunk.group] for chunk in plan.chunks)


def best_first(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Those that fit, fastest first."""
    fitting = [evaluation for evaluation in evaluations if evaluation.fits]
    return sorted(fitting, key=lambda evaluation: evaluation.iteration_s)


# Suspend garbage collection: simulations create a million objects without cycles.


@contextmanager
def gc_paused() -> Iterator[None]:
    """Suspend collection, which would take a third as long as creating the objects."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()
