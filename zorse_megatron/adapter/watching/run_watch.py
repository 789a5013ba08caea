"""Follow how long each rank's iterations take; all ranks know the same of all."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from megatron.training import get_args

from zorse_megatron.adapter.moving.requests import PlanRequests
from zorse_megatron.adapter.watching.exchange import Exchange
from zorse_megatron.adapter.watching.status import StatusReporter
from zorse_megatron.adapter.watching.switching import Switching
from zorse_megatron.rebalance.balancer import counts_of, workers_of
from zorse_megatron.rebalance.iteration_times import IterationTimes
from zorse_megatron.rebalance.link_times import LinkTimes
from zorse_megatron.rebalance.prepare import Prepared
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedules.policy import Worker
from zorse_megatron.schema.plan.plan import Plan

_TIMES = tuple(field.name for field in fields(IterationTimes))
"""What a rank tells begins with them; then what it has made of other counts, and requests."""
_OF_LINKS = len(_TIMES) + 2
"""Where the numbers of links begin in what a rank tells."""


@dataclass(kw_only=True)
class RunWatch:
    """What one rank notes, tells and hears."""

    plan: Plan
    times: StepTimes
    exchange: Exchange
    reporter: StatusReporter
    links: LinkTimes
    rank: int
    switching: Switching | None = None
    requests: PlanRequests | None = None

    def begin(self, number: int) -> Prepared | None:
        """Iteration `number` of this run begins; returns what is run from it on if that changes."""
        if number == 0:  # a checkpoint has been loaded, if there is one
            self.reporter.status.first_iteration = get_args().iteration
        self.times.begin(number)
        prepared = None if self.switching is None else self.switching.from_iteration(number)
        if prepared is not None:
            self.reporter.change(number, counts_of(prepared.plan))
        return prepared

    def end(self, done: int) -> None:
        """So many iterations have been run. A collective call that waits for nobody."""
        self.times.end()
        read = self.times.read()
        own = read or _times_of([-1.0] + [0.0] * len(_TIMES))
        code = 0.0 if self.switching is None else self.switching.code
        told = self.exchange.swap(
            (
                *astuple(own),
                code,
                0.0 if self.requests is None else self.requests.code(),
                *self.links.row(self.rank, self.times.messages if read else None),
            )
        )
        if told is not None:
            self._hear(told, done)

    def _hear(self, told: list[list[float]], done: int) -> None:
        ranks = tuple(map(_times_of, told))
        # A GPU may be an iteration behind the others; what is told is of one iteration or ignored.
        known = len({each.number for each in ranks}) == 1 and ranks[0].number >= 0
        if known:
            self.links.take([row[_OF_LINKS:] for row in told])
            self.reporter.take(ranks)
        if self.requests is not None:
            self.requests.hear(told[0][_OF_LINKS - 1])
        if self.switching is not None:
            seconds = self._seconds(ranks) if known else {}
            codes = [row[_OF_LINKS - 2] for row in told]
            self.switching.take(ranks[0].number, seconds, codes, done=done)

    def _seconds(self, ranks: tuple[IterationTimes, ...]) -> dict[Worker, float]:
        """Of a micro-batch of each replica: of a set's slowest rank."""
        return {
            (group, index): max(
                ranks[rank].micro_batch_s for rank in self.plan.groups[group].replicas[index].ranks
            )
            for group, index in workers_of(self.plan)
        }


def _times_of(row: Sequence[float]) -> IterationTimes:
    told: dict[str, Any] = dict(zip(_TIMES, row, strict=False))
    return IterationTimes(**{**told, "number": int(row[0])})
