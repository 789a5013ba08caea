"""Schedule a plan that gives the cost of its inter-stage transfers (`hop` of its chunks).

An order that is found without them lets a group start what has not arrived yet, and makes it
wait for that while other work is there.

What is sent at one moment queues behind what was sent before, in each direction, for as long as its
samples occupy the links; then it is on its way for their latency, and arrives all at once, as
where flows share a link in equal parts. So the simulation treats equal replicas alike, and a part
of them with their part of the batch finds the same order (see `simulate.equal_ranks`).
"""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from heapq import heappush

from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.events import BACKWARD_COST, Arrival, Event
from zorse_megatron.schedules.order import Pipeline
from zorse_megatron.schedules.policy import Policy
from zorse_megatron.schedules.samples import Piece
from zorse_megatron.schema.plan.plan import Plan

_Way = tuple[int, bool]
"""(chunk where messages arrive, forward?): one direction of a transfer."""


def pipeline_for(
    plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
) -> Pipeline:
    """The pipeline to simulate: the plain one, which is faster, where no transfer has a cost."""
    has_costs = any(chunk.hop is not None for chunk in plan.chunks)
    pipeline = PipelineWithTransfers if has_costs else Pipeline
    return pipeline(plan, boundaries, policy, forward_only=forward_only)


class PipelineWithTransfers(Pipeline):
    """As `Pipeline`, with messages that take time."""

    resolution = 10**9  # so that rounding to whole units of time changes nothing that counts

    def __init__(
        self, plan: Plan, boundaries: Boundaries, policy: Policy, *, forward_only: bool
    ) -> None:
        super().__init__(plan, boundaries, policy, forward_only=forward_only)
        worker = next(iter(self.workers.values()))
        whole = (1 + BACKWARD_COST) * len(worker.queue) * sum(worker.costs.values())
        self.latency: dict[_Way, int] = {}
        self.per_sample: dict[_Way, tuple[int, int]] = {}
        """Time as numerator and denominator."""
        for chunk, hop in enumerate(chunk.hop for chunk in plan.chunks):
            if hop is not None:
                per_sample = whole * Fraction(hop.load) / plan.global_batch_size
                for way in ((chunk + 1, True), (chunk, False)):
                    self.latency[way] = round(whole * Fraction(hop.latency))
                    self.per_sample[way] = per_sample.as_integer_ratio()
        self.free: dict[_Way, int] = defaultdict(int)
        """When all that was given to a direction is sent."""
        self.leaving: dict[_Way, list[Piece]] = defaultdict(list)
        """What is sent at this moment."""
        self.num_sent = 0

    def _startable(self, now: int) -> Iterator[Event]:
        for way, pieces in self.leaving.items():
            self._send(now, way, pieces)
        self.leaving.clear()
        yield from super()._startable(now)

    def _send(self, now: int, way: _Way, pieces: list[Piece]) -> None:
        samples = sum(piece.stop - piece.start for piece in pieces)
        above, below = self.per_sample[way]
        self.free[way] = max(now, self.free[way]) + samples * above // below
        arrival = Arrival(chunk=way[0], forward=way[1], pieces=tuple(pieces))
        time = self.free[way] + self.latency[way]
        if time == now:
            self._finish(arrival)
            return
        self.num_sent += 1
        heappush(self.running, (time, -1, self.num_sent, arrival))  # before computations that end

    def _pass_on(self, chunk: int, piece: Piece, *, forward: bool) -> None:
        if (chunk, forward) in self.latency:
            self.leaving[chunk, forward].append(piece)
        else:
            super()._pass_on(chunk, piece, forward=forward)

    def _finish(self, event: Event | Arrival) -> None:
        if isinstance(event, Event):
            super()._finish(event)
            return
        for piece in event.pieces:
            super()._pass_on(event.chunk, piece, forward=event.forward)
