"""The candidates costed in closed form so far, and the best of them."""

from itertools import zip_longest

from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.search.plan_keys import PlanKeys

ScheduleChoice = tuple[str, int]
"""Schedule and chunks of each group."""


class CostedCandidates:
    """Estimates, each plan once."""

    def __init__(
        self, estimator: Estimator, *, assignments: int, keys: PlanKeys | None = None
    ) -> None:
        """`assignments`: layer assignments that are kept of each candidate."""
        self.estimator = estimator
        self.assignments = assignments
        self._keys = keys or PlanKeys(estimator.inputs)
        self._found: dict[object, Estimate] = {}

    def add(self, estimate: Estimate) -> None:
        """Keep an estimate, unless the same plan is known."""
        self._found.setdefault(self._keys.of(estimate), estimate)

    def cost(self, candidate: Candidate) -> None:
        """Cost a candidate with its best layers."""
        for estimate in self.estimator.best(candidate, most=self.assignments):
            self.add(estimate)

    def finalists(self, most: int) -> list[Estimate]:
        """The best, of each schedule and number of chunks in turn.

        No more than half of them with one grouping, whatever the sizes and layers.
        """
        queues: dict[ScheduleChoice, list[Estimate]] = {}
        for estimate in sorted(self._found.values(), key=lambda e: (e.iteration_s, e.layers)):
            candidate = estimate.candidate
            queues.setdefault((candidate.schedule, candidate.num_chunks), []).append(estimate)
        taken: list[Estimate] = []
        per_grouping: dict[object, int] = {}
        turns = zip_longest(*queues.values())
        for estimate in (each for turn in turns for each in turn if each is not None):
            ranks = tuple(device_group.ranks for device_group in estimate.candidate.device_groups)
            key = ranks, estimate.candidate.schedule
            if per_grouping.get(key, 0) < max(1, most // 2):
                per_grouping[key] = per_grouping.get(key, 0) + 1
                taken.append(estimate)
            if len(taken) == most:
                break
        return taken
