"""Events of a simulated schedule: computations of replicas, and actions of entire groups.

Its time is exact, in integers without meaning outside it. It is the plan's own hypothesis
that the work is balanced: every group takes one unit for its part of the batch, each of its chunks
in proportion to its layers, and a replica with n micro-batches 1/n of that for each, one third of
it forward. Communication takes no time, but where the plan says how long (see `timed_transfers`).
"""

import math
from dataclasses import dataclass

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.schedules.samples import MicroBatch, Piece
from zorse_megatron.schema.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One forward, backward or weight gradient of a replica."""

    time: int
    end: int
    chunk: int
    kind: Kind
    micro_batch: MicroBatch

    @property
    def forward(self) -> bool:
        """Whether it is a forward."""
        return self.kind is Kind.FORWARD


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Messages that arrive together, having been sent together between two groups."""

    chunk: int
    """Where they arrive."""
    forward: bool
    """Whether they are activations."""
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEvent:
    """Actions that all ranks of a group take at one moment, those without micro-batches too."""

    time: int
    group: int
    actions: tuple[Action, ...]


BACKWARD_COST = 2
"""A backward takes twice as long as a forward: it makes gradients of inputs and of weights."""


def computation_cost(kind: Kind, *, splits: bool) -> int:
    """In forwards. `splits`: whether gradients of weights are a computation of their own."""
    return BACKWARD_COST if kind is Kind.BACKWARD and not splits else 1


def forward_costs(plan: Plan) -> list[dict[int, int]]:
    """Chunk -> replica -> time of one forward. Only replicas that have micro-batches."""
    layers = [stop - first for first, stop in (chunk.layers for chunk in plan.chunks)]
    of_group = [0] * len(plan.groups)
    for chunk, count in zip(plan.chunks, layers, strict=True):
        of_group[chunk.group] += count
    counts = [
        {
            number: replica.num_microbatches
            for number, replica in enumerate(group.replicas)
            if replica.num_microbatches
        }
        for group in plan.groups
    ]
    unit = math.lcm(
        *(whole * n for whole, ns in zip(of_group, counts, strict=True) for n in ns.values())
    )
    return [
        {
            replica: count * (unit // (of_group[chunk.group] * n))
            for replica, n in counts[chunk.group].items()
        }
        for chunk, count in zip(plan.chunks, layers, strict=True)
    ]
