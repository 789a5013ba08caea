"""The candidates costed in closed form so far, and the best of them."""

from itertools import zip_longest

from zorse_megatron.planner.closed_form.candidate import Estimate, Outline
from zorse_megatron.planner.closed_form.estimator import Estimator

Way = tuple[str, int]
"""Schedule and chunks of each group."""


class Estimates:
    """Estimates, each plan once."""

    def __init__(self, estimator: Estimator, *, layouts: int) -> None:
        """`layouts`: ways to deal out layers that are kept of each outline."""
        self.estimator = estimator
        self.layouts = layouts
        self._found: dict[object, Estimate] = {}

    def add(self, estimate: Estimate) -> None:
        """Keep an estimate, unless the same plan is known."""
        self._found.setdefault(key_of(estimate), estimate)

    def price(self, outline: Outline) -> None:
        """Price an outline with its best layers."""
        for estimate in self.estimator.best(outline, most=self.layouts):
            self.add(estimate)

    def finalists(self, most: int) -> list[Estimate]:
        """The best, of each schedule and number of chunks in turn.

        No more than half of them with one grouping, whatever the sizes and layers.
        """
        queues: dict[Way, list[Estimate]] = {}
        for estimate in sorted(self._found.values(), key=lambda e: (e.iteration_s, e.layers)):
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


def key_of(estimate: Estimate) -> object:
    """Equal for estimates of the same plan."""
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
