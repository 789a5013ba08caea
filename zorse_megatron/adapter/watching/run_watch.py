"""Follow how long each rank's iterations take; all ranks know the same of all."""

from dataclasses import dataclass

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

# Where the numbers of links begin in what a rank tells.
_OF_LINKS = 8
_NOTHING = IterationTimes(
    number=-1, micro_batch_s=0.0, compute_s=0.0, waited_s=0.0, update_s=0.0, iteration_s=0.0
)


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
        own = read or _NOTHING
        code = 0.0 if self.switching is None else self.switching.code
        told = self.exchange.swap(
            (
                own.number,
                own.micro_batch_s,
                own.compute_s,
                own.waited_s,
                own.update_s,
                own.iteration_s,
                code,
                0.0 if self.requests is None else self.requests.code(),
                *self.links.row(self.rank, self.times.messages if read else None),
            )
        )
        if told is not None:
            self._hear(told, done)

    def _hear(self, told: list[list[float]], done: int) -> None:
        ranks = tuple(
            IterationTimes(
                number=int(row[0]),
                micro_batch_s=row[1],
                compute_s=row[2],
                waited_s=row[3],
                update_s=row[4],
                iteration_s=row[5],
            )
            for row in told
        )
        # A GPU may be an iteration behind the others; what is told is of one iteration or ignored.
        known = len({each.number for each in ranks}) == 1 and ranks[0].number >= 0
        if known:
            self.links.take([row[_OF_LINKS:] for row in told])
            self.reporter.take(ranks)
        if self.requests is not None:
            self.requests.hear(told[0][7])
        if self.switching is not None:
            seconds = self._seconds(ranks) if known else {}
            codes = [row[6] for row in told]
            self.switching.take(ranks[0].number, seconds, codes, done=done)

    def _seconds(self, ranks: tuple[IterationTimes, ...]) -> dict[Worker, float]:
        """Of a micro-batch of each replica: of a set's slowest rank."""
        return {
            (group, index): max(
                ranks[rank].micro_batch_s for rank in self.plan.groups[group].replicas[index].ranks
            )
            for group, index in workers_of(self.plan)
        }
