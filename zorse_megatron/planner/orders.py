"""What a plan's orders follow: times of computations and messages, and how much is in flight.

The schedule's order is made of the plan alone (`schedule.micro_batch_order`), so that the run time
makes the same lists; what is written here comes from the costs that the simulator has.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zorse_megatron.plan.plan import Chunk, Group, Plan, Replica, TransferTime
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedule.pipeline_schedules import Worker, policy_of, round_of
from zorse_megatron.simulate.iteration import replica_times


def with_times(inputs: Inputs, plan: Plan) -> Plan:
    """The plan with the seconds of all computations and messages. `inputs`: of its ranks."""
    times = replica_times(plan, inputs)
    timed = (
        replace(replica, compute_s=tuple(map(_short, times[number, index])))
        for number, index, replica in plan.numbered_replicas()
    )
    return replace(plan.with_replicas(timed), chunks=tuple(_with_transfers(inputs, plan)))


def _short(seconds: Iterable[float]) -> tuple[float, float, float]:
    """Few digits, for people who read the file: they are estimates."""
    forward_s, backward_s, weights_s = (float(f"{each:.4g}") for each in seconds)
    return forward_s, backward_s, weights_s


def _with_transfers(inputs: Inputs, plan: Plan) -> Iterable[Chunk]:
    found: dict[tuple[int, int], TransferTime | None] = {}
    for at, chunk in enumerate(plan.chunks):
        if at + 1 == len(plan.chunks) or plan.chunks[at + 1].group == chunk.group:
            yield replace(chunk, transfer=None)
            continue
        pair = chunk.group, plan.chunks[at + 1].group
        if pair not in found:
            found[pair] = _transfer(inputs, *(plan.groups[number] for number in pair))
        yield replace(chunk, transfer=found[pair])


def _transfer(inputs: Inputs, source: Group, target: Group) -> TransferTime:
    """Of the slowest pair of ranks, alone on its links."""
    size = min(_largest(source), _largest(target))
    pairs = [(one, other) for one in _far(inputs, source) for other in _far(inputs, target)]
    first_s, second_s = (
        max(
            inputs.comm.transfer_s(*pair, count * inputs.memory.boundary_bytes(1)) for pair in pairs
        )
        for count in (1, 1 + size)
    )
    per_sample_s = (second_s - first_s) / size
    return TransferTime(
        latency_s=float(f"{max(0.0, first_s - per_sample_s):.4g}"),
        s_per_sample=float(f"{per_sample_s:.4g}"),
    )


def _largest(group: Group) -> int:
    return max(replica.micro_batch_size for replica in group.replicas)


def _far(inputs: Inputs, group: Group) -> list[int]:
    """A rank of each node."""
    found: dict[int, int] = {}
    for rank in group.ranks:
        found.setdefault(inputs.spec.node_of(rank), rank)
    return list(found.values())


# How much is in flight.


def with_limits(plan: Plan, extras: Sequence[int]) -> Plan:
    """The plan with the limits of its schedule's rule, and so many samples of each group more."""
    limits: dict[Worker, InFlight] = {}
    for (number, index), most in limits_by_rule(plan).items():
        replica = plan.groups[number].replicas[index]
        more = -(-extras[number] * replica.num_microbatches // plan.global_batch_size)
        more *= replica.micro_batch_size * _most_layers(plan, number)
        limits[number, index] = InFlight(most=most + more)
    return with_in_flight(plan, limits)


def limits_by_rule(plan: Plan) -> dict[Worker, int]:
    """What the rule of 1f1b or interleaved has in flight, in samples times layers.

    Each micro-batch counts as many layers as its group's largest chunk has. `plan`: without limits.
    """
    return {
        (number, index): count
        * plan.groups[number].replicas[index].micro_batch_size
        * _most_layers(plan, number)
        for (number, index), count in policy_of(plan).limits.items()
    }


Base = Literal["Little's law", "schedule's rule"]


@dataclass(frozen=True, kw_only=True)
class GroupOrder:
    """How much a group has in flight."""

    splits: bool
    """Whether weight gradients are apart from backwards."""
    factor: float
    """Times what `base` has in flight: more absorbs delays, and takes memory."""
    delayed: float
    """In which part of that, and beyond it, weight gradients may wait."""
    base: Base = "Little's law"


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """What a replica has in flight at most, in samples times layers."""

    most: int
    delayed: int | None = None
    """Beyond that, what weight gradients wait for; None: as little as possible."""


def with_in_flight(plan: Plan, limits: Mapping[Worker, InFlight]) -> Plan:
    """The plan with these limits; a replica without one follows the schedule's rule."""

    def limited(number: int, index: int, replica: Replica) -> Replica:
        limit = limits.get((number, index))
        if limit is None:
            return replace(replica, max_in_flight=None, max_delayed_wgrad=None)
        delayed = limit.delayed if plan.groups[number].split_backward else None
        return replace(replica, max_in_flight=limit.most, max_delayed_wgrad=delayed)

    return plan.with_replicas(itertools.starmap(limited, plan.numbered_replicas()))


def in_flight_times(plan: Plan, number: int, part: float) -> Plan:
    """The plan with so much of what a group may have in flight, but one micro-batch at least."""

    def limited(group: int, index: int, replica: Replica) -> Replica:
        if group != number or replica.max_in_flight is None:
            return replica
        least = least_in_flight(plan, number, index)
        return replace(replica, max_in_flight=max(least, int(part * replica.max_in_flight)))

    return plan.with_replicas(itertools.starmap(limited, plan.numbered_replicas()))


def littles_law(plan: Plan) -> dict[Worker, float]:
    """What each replica has in flight to be never without work, in samples times layers.

    A group needs as many samples of a chunk in flight as the slowest group computes in the time in
    which one goes from there to the loss and back, links included, and those of one round, which it
    runs at once. A replica has its part of them by its part of the batch. `plan`: `with_times`.
    """
    needed = _samples_needed(plan)
    found: dict[Worker, float] = {}
    for number, group in enumerate(plan.groups):
        whole = sum(
            needed[chunk] * plan.chunks[chunk].num_layers for chunk in plan.chunks_of_group(number)
        )
        for index, replica in enumerate(group.replicas):
            if replica.num_microbatches:
                found[number, index] = whole * replica.num_samples / plan.global_batch_size
    return found


def least_in_flight(plan: Plan, number: int, index: int) -> int:
    """One micro-batch of a replica in its largest chunk."""
    size = plan.groups[number].replicas[index].micro_batch_size
    return max(1, size * _most_layers(plan, number))


def busiest_s(plan: Plan) -> float:
    """How long the replica computes that computes longest. `plan`: `with_times`."""
    return max(busy_by_group_s(plan).values())


def busy_by_group_s(plan: Plan) -> dict[int, float]:
    """Group -> how long its replica computes that computes longest. `plan`: `with_times`."""
    return {
        number: max(
            replica.num_times * sum(map(sum, replica.compute_s or ())) for replica in group.replicas
        )
        for number, group in enumerate(plan.groups)
    }


def _samples_needed(plan: Plan) -> list[float]:
    """Of each chunk."""
    working = [
        [replica for replica in group.replicas if replica.num_microbatches] for group in plan.groups
    ]
    per_sample_s = busiest_s(plan) / plan.global_batch_size
    found, to_loss_and_back_s = [0.0] * len(plan.chunks), 0.0
    for chunk in reversed(range(len(plan.chunks))):
        number = plan.chunks[chunk].group
        place = plan.chunks_of_group(number).index(chunk)
        to_loss_and_back_s += max(sum((each.compute_s or ())[place]) for each in working[number])
        transfer = plan.chunks[chunk].transfer
        if transfer is not None:
            size = max(replica.micro_batch_size for replica in working[number])
            to_loss_and_back_s += 2 * (transfer.latency_s + size * transfer.s_per_sample)
        found[chunk] = to_loss_and_back_s / per_sample_s + round_of(plan.groups[number])
    return found


def _most_layers(plan: Plan, number: int) -> int:
    return max(plan.chunks[chunk].num_layers for chunk in plan.chunks_of_group(number))
