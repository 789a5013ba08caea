"""Processes of a search, one or two: each costs candidates and simulates them.

Which worker does what follows from the search alone, so what is found does not depend on how many
processors there are: with one, the second worker's tasks are done in this process too, one after
the other. Otherwise it has a fresh interpreter (`worker_process`), because a fork of a process with
threads, such as a progress bar's, may never end, and `multiprocessing` would import the caller's
main module again.
"""

import math
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.closed_form.candidate import Estimate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroup
from zorse_megatron.planner.closed_form.stage_costs import StageCost
from zorse_megatron.planner.evaluate import Evaluation, Evaluator, Preview, gc_paused
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import OnProgress, SearchStats
from zorse_megatron.planner.search.effort import Effort, Groupings
from zorse_megatron.planner.search.local_moves import LocalMoves
from zorse_megatron.planner.search.sources import CandidateSource, CostedCandidates, Sources
from zorse_megatron.processes import num_processors
from zorse_megatron.simulate.result import SimulationResult

# One search process: costs candidates in closed form and simulates them.


_POLISHING_STEPS = 6
_PROMISING = 1.005  # previews so much longer than a simulated iteration are left at that

T = TypeVar("T")
Task = Callable[["SearchWorker"], T]
"""A unit of work for a worker, in this process or another: a partial call of a method of it."""


@dataclass(frozen=True, kw_only=True)
class FittingPlan:
    """A plan that fits, perhaps with more memory left free than was asked for at first."""

    estimate: Estimate
    evaluation: Evaluation
    """Without its simulation."""


class SearchWorker:
    """Costs and simulates candidates; what has been found once is not computed again."""

    def __init__(self, inputs: Inputs, effort: Effort, on_progress: OnProgress) -> None:
        self.inputs = inputs
        self.report = on_progress
        self.evaluator = Evaluator(inputs)
        self.estimator = self.evaluator.estimator
        self._fastest: Evaluation | None = None
        self._groupings_before = 0
        self._begin(effort)

    def _begin(self, effort: Effort) -> None:
        self.effort = effort
        self.costed_candidates = CostedCandidates(self.estimator, assignments=effort.assignments)
        self.sources = Sources(
            inputs=self.inputs,
            effort=effort,
            estimator=self.estimator,
            costed_candidates=self.costed_candidates,
            groupings=Groupings(self.estimator),
            report=self.report,
        )
        self.local_moves = LocalMoves(effort=effort, estimator=self.estimator, sources=self.sources)

    def begin_again(self, effort: Effort) -> None:
        """Forget which candidates there are, but not what they cost; nothing where it is new."""
        if effort is not self.effort and effort != self.effort:
            self._groupings_before += len(self.sources.groupings.seen)
            self._begin(effort)

    @property
    def spent(self) -> SearchStats:
        """Work done so far."""
        return SearchStats(
            groupings=self._groupings_before + len(self.sources.groupings.seen),
            estimated=self.estimator.num_estimated,
            simulated=self.evaluator.num_simulated,
            computations=self.evaluator.num_computations,
        )

    # Closed form.

    def cost(self, sources: Sequence[CandidateSource]) -> list[Estimate]:
        """The best of what comes from these sources, polished."""
        for source in sources:
            self.sources.cost(source)
        self._polish()
        return self.costed_candidates.finalists(self.effort.finalists)

    def _polish(self) -> None:
        """Better levels and orders for the best estimates."""
        for estimate in self.costed_candidates.finalists(self.effort.polished):
            best = estimate
            for _ in range(_POLISHING_STEPS):
                found = [
                    near
                    for each in self.local_moves.promising_swaps(best)
                    for near in self.estimator.best(each)
                ]
                if self.effort.keeps_all:
                    for near in found:
                        self.costed_candidates.add(near)
                better = min(found, key=lambda each: (each.iteration_s, each.layers), default=best)
                if better.iteration_s > 0.999 * best.iteration_s:
                    break
                best = better
                self.costed_candidates.add(best)

    # Simulation.

    def preview(self, estimate: Estimate) -> Preview | None:
        """See `Evaluator.preview`."""
        return self.evaluator.preview(estimate)

    def fit(self, estimate: Estimate | None, best_s: float, *, refits: int) -> FittingPlan | None:
        """Simulate, and ask for more free memory where it does not fit, a few times.

        First a part of the batch; the whole of it only where that may be faster than `best_s`.
        """
        for _ in range(1 + refits):
            if estimate is None:
                return None
            preview = self.evaluator.preview(estimate)
            if preview is not None and not preview.fits:
                estimate = self._reserved(estimate, preview.overflow_bytes)
                continue
            if preview is not None and preview.iteration_s > _PROMISING * best_s:
                return None
            evaluation = self.evaluator.evaluate(estimate)
            if evaluation is None:
                estimate = self._reserved(estimate, self.evaluator.builder.missing_bytes(estimate))
                continue
            if evaluation.fits:
                self._keep(evaluation)
                return FittingPlan(estimate=estimate, evaluation=replace(evaluation, result=None))
            if evaluation.fits_gpus:
                return None  # of host memory, more left free in the GPUs would take more
            estimate = self._reserved(estimate, evaluation.overflow_bytes)
        return None

    def _keep(self, evaluation: Evaluation) -> None:
        """A simulation holds every task of it, so only one is kept."""
        least_s = self._fastest.iteration_s if self._fastest else math.inf
        if evaluation.iteration_s < least_s:
            self._fastest = evaluation

    def simulation_of(self, plan: Plan) -> SimulationResult | None:
        """The simulation of the fastest plan that fitted, if it is this one."""
        if self._fastest is None or self._fastest.plan != plan:
            return None
        return self._fastest.result

    def _reserved(self, estimate: Estimate, overflow: Sequence[int]) -> Estimate | None:
        """The same with more memory left free in the groups that have too little."""
        candidate = estimate.candidate
        before = candidate.reserves or (0,) * len(candidate.device_groups)
        step = max(1, min(self.inputs.capacities_bytes) // 200)
        more = [
            over + _estimated_free_bytes(cost, device_group) if over > 0 else 0
            for over, cost, device_group in zip(
                overflow, estimate.costs, candidate.device_groups, strict=True
            )
        ]
        nowhere = not any(more)
        reserves = tuple(
            reserve + each + step if each or nowhere else reserve
            for reserve, each in zip(before, more, strict=True)
        )
        return self.estimator.estimate(replace(candidate, reserves=reserves), estimate.layers)


def _estimated_free_bytes(cost: StageCost, device_group: DeviceGroup) -> int:
    """What the closed form took to be free on each GPU, where all of a device group are equal.

    With less than that as a reserve it would give the same settings again.
    """
    return (
        int(cost.free_bytes) // len(device_group.ranks) if len(device_group.gpu_classes) == 1 else 0
    )


_ALONE_UP_TO = 16  # GPUs; a search of so few is done sooner than a process has started


class _WorkerHandle(Protocol):
    """Where a worker is."""

    spent: SearchStats

    def start(self, task: Task[Any]) -> None: ...

    def answer(self) -> Any: ...


class Workers:
    """Workers that do tasks at once."""

    def __init__(self, workers: Sequence[_WorkerHandle], first: SearchWorker) -> None:
        self._workers = tuple(workers)
        self.first = first
        """It is in this process."""

    @property
    def number(self) -> int:
        """How many tasks are done at once."""
        return len(self._workers)

    @property
    def spent(self) -> SearchStats:
        """Work done by all workers."""
        return sum((worker.spent for worker in self._workers), SearchStats())

    def do(self, tasks: Sequence[Task[T]]) -> list[T]:
        """The n-th worker does the n-th task. Raises RuntimeError if a process fails."""
        used = list(zip(self._workers, tasks, strict=False))
        assert len(used) == len(tasks), "more tasks than workers"
        for worker, task in reversed(used):  # the first one works in this process: it goes last
            worker.start(task)
        return [worker.answer() for worker, _ in used]

    def all_do(self, task: Task[T]) -> list[T]:
        """Each worker does the same task."""
        return self.do([task] * self.number)


@contextmanager
def workers_for(inputs: Inputs, effort: Effort, on_progress: OnProgress) -> Iterator[Workers]:
    """As many workers as the cluster is worth; their processes end with the context."""
    first = SearchWorker(inputs, effort, on_progress)
    if inputs.world_size <= _ALONE_UP_TO:
        yield Workers([_LocalWorker(first)], first)
    elif num_processors() < 2:
        second = SearchWorker(inputs, effort, on_progress)
        yield Workers([_LocalWorker(first), _LocalWorker(second)], first)
    else:
        with _process_for(inputs, effort) as process:
            yield Workers([_LocalWorker(first), _RemoteWorker(process)], first)


class _LocalWorker:
    """A worker in this process."""

    def __init__(self, worker: SearchWorker) -> None:
        self.worker = worker
        self.spent = worker.spent
        self._answers: deque[Any] = deque()

    def start(self, task: Task[Any]) -> None:
        self._answers.append(task(self.worker))
        self.spent = self.worker.spent

    def answer(self) -> Any:
        return self._answers.popleft()


class _RemoteWorker:
    """A worker in another process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.spent = SearchStats()

    def start(self, task: Task[Any]) -> None:
        _send(self.process, task)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        try:
            with gc_paused():
                answer, self.spent = pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError) as error:
            if not isinstance(error, EOFError):
                self.process.kill()  # it may wait for the next task
            raise RuntimeError(
                f"the planner's second process ended with status {self.process.wait()}; its error "
                "is above. If it was killed, memory is likely short"
            ) from error
        return answer


@contextmanager
def _process_for(inputs: Inputs, effort: Effort) -> Iterator[subprocess.Popen[bytes]]:
    # It imports what this process does: nothing from the directory that it happens to start in.
    command = [sys.executable, "-P", "-m", "zorse_megatron.planner.search.worker_process"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        try:
            _send(process, (inputs, effort))
            yield process
        finally:
            process.kill()  # it waits for more, unless this process is being stopped
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # of what it has not read
                process.stdin.close()


def _send(process: subprocess.Popen[bytes], message: object) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: that is told when its answer is missing
        process.stdin.write(pickle.dumps(message))
        process.stdin.flush()
