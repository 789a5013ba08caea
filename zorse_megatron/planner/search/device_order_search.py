"""Search device orders, micro-batch sizes and contiguous partitions for the best pipeline."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.planner.closed_form.candidate import Outline
from zorse_megatron.planner.closed_form.device_groups import Teams
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.closed_form.segment_costs import Class, LinePrices, best_sizes
from zorse_megatron.planner.closed_form.segment_tails import LineTails
from zorse_megatron.planner.search.contiguous_partition import (
    COARSE,
    FINE,
    Cut,
    Line,
    best_cuts,
    lines,
)

_FIRST_LEVEL, _OTHER_LEVELS = 2, (1, 3, 4)
_FINE_LINES = 6  # that are priced in fine units
_KEPT_LINES = 3  # that are priced at all levels
_KEPT_CUTS = 2  # of each line and choice of sizes
_DESCENTS = 2  # cuts from which the sizes of single classes are changed
_STEPS = 3
_SIZES = (1, 2, 3, 4, 6, 8)

Sizes = dict[Class, int]


@dataclass(frozen=True, kw_only=True)
class _Found:
    line: Line
    sizes: Sizes
    cut: Cut


class LineSearch:
    """The best cuts of all lines: into groups that work in step (nested), or into any."""

    def __init__(
        self, estimator: Estimator, teams: Teams, *, nested: bool, most_groups: int
    ) -> None:
        """`nested`: see `LinePrices`."""
        self.inputs = estimator.inputs
        self.estimator = estimator
        self.teams = teams
        self.nested = nested
        self.most_groups = most_groups
        most = self.inputs.space.max_micro_batch_size or self.inputs.global_batch_size
        self.most_size = min(most, self.inputs.global_batch_size)
        self.found: list[_Found] = []
        self._tails: dict[Line, LineTails] = {}

    def outlines(self) -> Iterator[Outline]:
        """Outlines of the cuts, best first; the same for the same inputs."""
        for line in self._promising_lines():
            self._look(line, self._level(_FIRST_LEVEL))
        best_lines = list(dict.fromkeys(found.line for found in self._ranked()))
        for line in best_lines[:_KEPT_LINES]:
            for level in _OTHER_LEVELS:
                self._look(line, self._level(level))
        if not self.nested:
            for found in self._ranked()[:_DESCENTS]:
                self._descend(found)
        for found in self._ranked():
            yield self._outline(found.cut)

    def _promising_lines(self) -> list[Line]:
        """The lines whose cuts along coarse units are best."""
        fine, coarse = (
            lines(self.inputs, most_units=most, halved=self.nested) for most in (FINE, COARSE)
        )
        if len(fine) <= _FINE_LINES:
            return fine
        values: list[float] = []
        for line in coarse:
            found = self._look(line, self._level(_FIRST_LEVEL))
            values.append(found.cut.value_s if found else math.inf)
        self.found.clear()
        ranked = sorted(range(len(fine)), key=lambda at: (values[at], at))
        return [fine[at] for at in ranked[:_FINE_LINES]]

    def _ranked(self) -> list[_Found]:
        return sorted(self.found, key=lambda found: found.cut.value_s)

    def _look(self, line: Line, sizes: Sizes) -> _Found | None:
        """Find the best cuts, and return the best of all."""
        prices = LinePrices(
            self.inputs,
            self.estimator.stages,
            self.teams,
            self._tails_of(line),
            sizes=sizes,
            nested=self.nested,
        )
        cuts = best_cuts(prices, most_groups=self.most_groups)[:_KEPT_CUTS]
        new = [_Found(line=line, sizes=sizes, cut=cut) for cut in cuts]
        self.found += new
        return new[0] if new else None

    def _tails_of(self, line: Line) -> LineTails:
        if line not in self._tails:
            networks = self.estimator.networks
            self._tails[line] = LineTails(self.inputs, self.estimator.stages, networks, line)
        return self._tails[line]

    def _descend(self, start: _Found) -> None:
        """Change the size of one class at a time, as long as that helps."""
        best = start
        for _ in range(_STEPS):
            tried = [self._look(start.line, sizes) for sizes in self._near(best.sizes)]
            better = min(
                (found for found in tried if found is not None),
                key=lambda found: found.cut.value_s,
                default=best,
            )
            if better.cut.value_s >= best.cut.value_s:
                return
            best = better

    def _near(self, sizes: Sizes) -> Iterator[Sizes]:
        for each, size in sizes.items():
            larger = [other for other in _SIZES if size < other <= self.most_size][:1]
            smaller = [other for other in _SIZES if other < size][-1:]
            for other in smaller + larger:
                yield {**sizes, each: other}

    def _level(self, level: int) -> Sizes:
        level = min(level, self.most_size)
        found = best_sizes(self.inputs, self.estimator.stages, level)
        return dict.fromkeys(found, level) if self.nested else found

    def _outline(self, cut: Cut) -> Outline:
        return Outline(
            teams=tuple(map(self.teams.of, cut.groups)),
            levels=cut.sizes,
            schedule="1f1b" if self.nested else "interleaved",
            origin="cut of a line",
        )
