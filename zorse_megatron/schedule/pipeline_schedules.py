"""The pipeline schedules: 1F1B, interleaved, breadth-first. A new one goes here."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from zorse_megatron.plan.memory_settings import ranks_that_offload
from zorse_megatron.plan.plan import Group, Plan
from zorse_megatron.schedule.action_sequence import (
    Durations,
    Event,
    GroupEvent,
    Unit,
    between_units,
)
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.samples import Boundaries, MicroBatch, MicroBatchKey

Worker = tuple[int, int]
"""(group, replica)."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a schedule asks of each replica."""

    limits: Mapping[Worker, int]
    """Most that is in flight: micro-batches, counted once for each chunk, or `counts_layers`."""
    most_delayed: Mapping[Worker, int | None]
    """Most whose weight gradients wait, counted likewise; None: backwards compute them."""
    samples_per_round: int
    """Samples that a replica takes through all of its chunks before those after them."""
    counts_layers: bool = False
    """Whether a micro-batch counts its samples times the layers of the chunk."""
    reserved: float = 0.0
    """Part of a limit that is kept for a replica's later chunks, for each by its layers."""
    backwards_first: frozenset[int] = frozenset()
    """Groups that prefer backwards to forwards; the others fill up first."""
    strict: bool = False
    """Whether a replica waits for what it prefers, although it could start something else."""


def policy_of(plan: Plan) -> Policy:
    """That of 1f1b or interleaved: with the plan's own limits, or with those of Megatron's rule."""
    replicas = [replica for group in plan.groups for replica in group.replicas]
    if any(replica.max_in_flight for replica in replicas):
        return _of_own_limits(plan)
    return one_f_one_b(plan) if plan.schedule.name == "1f1b" else interleaved(plan)


# Limits that the plan gives, as far as memory goes: samples times layers of each replica.
#
# A replica needs as many samples in flight as its group gets through in the time in which one goes
# from there to the loss and back (Little's law); with more, delays of others reach it later. The
# last group has nobody to wait for, so it runs a backward as soon as it can. Forwards of the first
# chunks of a replica may not take all room: samples come back to it only through its later ones.

_RESERVED = 0.5


def _of_own_limits(plan: Plan) -> Policy:
    limits, delayed = {}, {}
    for number, index, replica in plan.numbered_replicas():
        if replica.max_in_flight is not None:
            limits[number, index] = replica.max_in_flight
            most = replica.max_delayed_wgrad or 0
            delayed[number, index] = most if plan.groups[number].split_backward else None
    return Policy(
        limits=limits,
        most_delayed=delayed,
        counts_layers=True,
        reserved=_RESERVED,
        samples_per_round=sum(map(round_of, plan.groups)),
        backwards_first=frozenset({plan.chunks[-1].group}),
    )


# 1F1B over unequal groups: each replica's in-flight limit.
#
# Megatron's 1F1B lets stage s of S hold S - s micro-batches: one for itself and one for each stage
# after it. In samples: what one round of micro-batches of this group and of every later group
# holds. A replica gets its part of those samples, by its part of the global batch, rounded up.


def one_f_one_b(plan: Plan) -> Policy:
    """Forwards first, up to the limit.

    With equal groups this is `forward_backward_pipelining_without_interleaving`, where stage s
    may hold num_warmup_microbatches + 1 = S - s.
    """
    rounds = [round_of(plan.groups[chunk.group]) for chunk in plan.chunks]
    limits: dict[Worker, int] = {}
    for position, chunk in enumerate(plan.chunks):
        shares = share_out(plan, chunk.group, sum(rounds[position:]))
        if position == len(rounds) - 1:
            shares = dict.fromkeys(shares, 1)  # a backward can always follow its forward
        limits |= shares
    return Policy(
        limits=limits,
        most_delayed=_most_delayed(plan),
        samples_per_round=plan.global_batch_size,
        strict=_is_megatrons(plan),
    )


def round_of(group: Group) -> int:
    """Samples of one micro-batch of each replica."""
    return sum(replica.micro_batch_size for replica in group.replicas if replica.num_microbatches)


def share_out(plan: Plan, number: int, samples: int) -> dict[Worker, int]:
    """Each replica's part of the samples that its group may have in flight, in micro-batches."""
    return {
        (number, index): max(1, -(-samples * replica.num_microbatches // plan.global_batch_size))
        for index, replica in enumerate(plan.groups[number].replicas)
        if replica.num_microbatches
    }


# Interleaved 1F1B over unequal groups with several chunks each; parameters stay unsharded.
#
# Megatron's `forward_backward_pipelining_with_interleaving` takes P micro-batches, one for each of
# its P stages, through all V chunks of a stage before the next P. Stage s starts its backwards
# after (V - 1) P + 2 (P - s - 1) forwards, and then does one forward and one backward in turn. In
# samples: a group takes one round of micro-batches of all groups through all of its chunks; and it
# may have in flight that many for each of its chunks but the last, two rounds of every chunk after
# its last one, and one round of its own.


def interleaved(plan: Plan) -> Policy:
    """Forwards first, up to the limit.

    For a plan that Megatron could run this is its order, with `microbatch_group_size_per_vp_stage`
    = P. In others a replica does what it can rather than wait for its turn: on random plans of
    unequal groups that takes a quarter off the simulated time.
    """
    rounds = [round_of(group) for group in plan.groups]
    limits: dict[Worker, int] = {}
    for number in range(len(plan.groups)):
        chunks = plan.chunks_of_group(number)
        after = sum(rounds[chunk.group] for chunk in plan.chunks[chunks[-1] + 1 :])
        samples = (len(chunks) - 1) * sum(rounds) + 2 * after + rounds[number]
        limits |= share_out(plan, number, samples)
    return Policy(
        limits=limits,
        most_delayed=_most_delayed(plan),
        samples_per_round=sum(map(round_of, plan.groups)),
        strict=_is_megatrons(plan),
    )


def _most_delayed(plan: Plan) -> dict[Worker, int | None]:
    return {
        (number, index): most_delayed(plan, number, index)
        for number, index, replica in plan.numbered_replicas()
        if replica.num_microbatches
    }


def _is_megatrons(plan: Plan) -> bool:
    """Equal groups, chunks dealt out in turn, and micro-batches in whole rounds of stages."""
    stages = len(plan.groups)
    order = [chunk.group for chunk in plan.chunks]
    works = {
        (len(group.replicas), replica.micro_batch_size, replica.num_microbatches, replica.halved)
        for group in plan.groups
        for replica in group.replicas
    }
    turns = order[:stages] * (len(order) // stages)
    return (
        len(works) == 1
        and order == turns
        and plan.groups[0].replicas[0].num_microbatches % stages == 0
        and plan.groups[0].replicas[0].halved is None
    )


# Breadth-first ministages: a group runs all micro-batches of a chunk, then its next chunk.
#
# The order of Zorse (arXiv 2507.10392, section 3) and, with one group, Cephalo's layered
# accumulation (arXiv 2411.01075). Each group *visits* its chunks: forward in model order, then
# backward in reverse, each time with all of its micro-batches. On the model's last chunk a forward
# and the backward of the same micro-batch alternate, so that only one of them has its activations
# and logits there, and gradients start early.
#
# The order of each rank's computations is thus fixed; when they run is found by simulating them
# once, visit by visit. When a group changes what is unsharded (see `action_sequence`), all its
# replicas wait for each other in the simulation, because they take part in the same collectives.
# Every wait is for something earlier in the order of visits, so the simulation always ends.
#
# Weight gradients that are computed apart (`weight_gradients`) belong to the visit of their
# backward.


PER_PASS = "per_pass"
RESIDENT = "resident"
PER_MICRO_BATCH = "per_micro_batch"


def parameters_setting(plan: Plan) -> str:
    """How long parameters stay unsharded under the plan's schedule."""
    if plan.schedule.name != "breadth_first":
        return RESIDENT
    return str(plan.schedule.parameters.get("parameters", PER_PASS))


@dataclass(frozen=True, kw_only=True)
class Visit:
    """All micro-batches of one chunk, in one direction or both."""

    chunk: int
    passes: tuple[bool, ...]
    """What a micro-batch runs, one after the other: True for its forward."""
    num_rounds: int = 1
    """Equal parts, between which the group may change what is unsharded."""

    @property
    def ends_backward(self) -> bool:
        """Whether the chunk's gradients are complete at the end."""
        return False in self.passes


def visits(plan: Plan, *, forward_only: bool) -> list[Visit]:
    """All groups' visits in the order in which the first sample makes them."""
    last = len(plan.chunks) - 1
    found = [Visit(chunk=chunk, passes=(True,)) for chunk in range(last)]
    found.append(Visit(chunk=last, passes=(True,) if forward_only else (True, False)))
    if not forward_only:
        found += [Visit(chunk=chunk, passes=(False,)) for chunk in reversed(range(last))]
    if parameters_setting(plan) != PER_MICRO_BATCH:
        return found
    return [
        Visit(
            chunk=visit.chunk,
            passes=visit.passes,
            num_rounds=max(
                replica.num_microbatches
                for replica in plan.groups[plan.chunks[visit.chunk].group].replicas
            ),
        )
        for visit in found
    ]


def simulate_breadth_first(
    plan: Plan, boundaries: Boundaries, *, forward_only: bool
) -> tuple[list[Event], list[GroupEvent]]:
    """Simulate a step. Complexity: O(computations + pieces that travel)."""
    simulation = _BreadthFirst(plan, boundaries, visits(plan, forward_only=forward_only))
    simulation.run()
    return simulation.events, simulation.group_events


@dataclass(kw_only=True)
class _Group:
    """Where a group stands in the simulation."""

    replicas: dict[int, tuple[MicroBatch, ...]]
    free: dict[int, int] = field(init=False)
    """Replica -> when its last computation ended."""
    before: dict[tuple[int, int], tuple[Action, ...]] = field(default_factory=dict)
    """(visit, round) -> what the group does before it."""
    at_end: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        self.free = dict.fromkeys(self.replicas, 0)


class _BreadthFirst:
    def __init__(self, plan: Plan, boundaries: Boundaries, order: list[Visit]) -> None:
        self.boundaries = boundaries
        self.order = order
        self.durations = Durations(plan)
        self.groups = [_Group(replicas=queues) for queues in boundaries.queues]
        self.most_delayed = {
            (number, replica): most_delayed(plan, number, replica)
            for number, group in enumerate(self.groups)
            for replica in group.replicas
        }
        """(group, replica) -> see `weight_gradients`."""
        self.offloads_parameters = ranks_that_offload(plan, "parameters")
        for number, group in enumerate(self.groups):
            self._prepare(plan, number, group)
        self.events: list[Event] = []
        self.group_events: list[GroupEvent] = []
        self.ends: dict[tuple[int, bool], dict[MicroBatchKey, int]] = {
            (chunk, forward): {}
            for chunk in range(boundaries.last + 1)
            for forward in (True, False)
        }
        """(chunk, forward?) -> micro-batch -> when it was computed."""

    def _prepare(self, plan: Plan, number: int, group: _Group) -> None:
        """Find what the group does between its units of work."""
        setting = parameters_setting(plan)
        units: list[Unit] = []
        starts: list[tuple[int, int]] = []
        for at, visit in enumerate(self.order):
            if self.boundaries.groups[visit.chunk] != number:
                continue
            for turn in range(visit.num_rounds):
                ends = visit.ends_backward and turn == visit.num_rounds - 1
                unit = Unit(chunk=visit.chunk, ends_backward=ends)
                if setting != PER_MICRO_BATCH and units and units[-1].chunk == visit.chunk:
                    units[-1] = unit  # the group turns: nothing changes between its two visits
                else:
                    units.append(unit)
                    starts.append((at, turn))
        members = plan.groups[number].ranks
        *before, group.at_end = between_units(
            units,
            resident=setting == RESIDENT,
            offload=not self.offloads_parameters.isdisjoint(members),
        )
        group.before = dict(zip(starts, before, strict=True))

    def run(self) -> None:
        for at, visit in enumerate(self.order):
            number = self.boundaries.groups[visit.chunk]
            for turn in range(visit.num_rounds):
                self._together(number, self.groups[number].before.get((at, turn), ()))
                for replica in self.groups[number].replicas:
                    self._round(visit, turn, self.groups[number], replica)
        for number, group in enumerate(self.groups):
            self._together(number, group.at_end)

    def _together(self, number: int, actions: tuple[Action, ...]) -> None:
        """Let the group's replicas wait for each other, and act."""
        if actions:
            group = self.groups[number]
            now = max(group.free.values())
            group.free = dict.fromkeys(group.free, now)
            self.group_events.append(GroupEvent(time=now, group=number, actions=actions))

    def _round(self, visit: Visit, turn: int, group: _Group, replica: int) -> None:
        """Run a replica's part of a round; with several rounds, micro-batches are spread evenly."""
        queue = group.replicas[replica]
        first, stop = (
            -(-part * len(queue) // visit.num_rounds) for part in (turn, turn + 1)
        )  # rounded up
        now, chunk = group.free[replica], visit.chunk
        most = self.most_delayed[self.boundaries.groups[chunk], replica]
        weights = self.durations.of(Kind.WEIGHT_GRADIENT, chunk, replica)
        delayed: deque[MicroBatch] = deque()
        for micro_batch in queue[first:stop]:
            for forward in visit.passes:
                arrive = self._inputs_arrive(chunk, micro_batch, forward=forward)
                while delayed and (len(delayed) > (most or 0) or now + weights <= arrive):
                    now = self._compute(now, chunk, Kind.WEIGHT_GRADIENT, delayed.popleft())
                kind = Kind.FORWARD if forward else Kind.BACKWARD
                now = self._compute(max(now, arrive), chunk, kind, micro_batch)
                self.ends[chunk, forward][micro_batch.key] = now
                if not forward and most is not None:
                    delayed.append(micro_batch)
        for micro_batch in delayed:
            now = self._compute(now, chunk, Kind.WEIGHT_GRADIENT, micro_batch)
        group.free[replica] = now

    def _compute(self, start: int, chunk: int, kind: Kind, micro_batch: MicroBatch) -> int:
        """Let a replica compute; returns when it is done."""
        end = start + self.durations.of(kind, chunk, micro_batch.replica)
        self.events.append(
            Event(time=start, end=end, chunk=chunk, kind=kind, micro_batch=micro_batch)
        )
        return end

    def _inputs_arrive(self, chunk: int, micro_batch: MicroBatch, *, forward: bool) -> int:
        if forward and chunk > 0:
            ends = self.ends[chunk - 1, True]
            pieces = self.boundaries.after_chunk[chunk - 1].by_target[micro_batch.key]
            return max(ends[piece.source.key] for piece in pieces)
        if not forward and chunk < self.boundaries.last:
            ends = self.ends[chunk + 1, False]
            pieces = self.boundaries.after_chunk[chunk].by_source[micro_batch.key]
            return max(ends[piece.target.key] for piece in pieces)
        return 0


# How long weight gradients may wait, in groups that compute them apart from their backwards.
#
# Qi et al. 2024 (arXiv 2401.10241, ZB-H1): stage s of S keeps S - s micro-batches between forward
# and backward, and s more between backward and weight gradients, so that all stages keep as many.
# Then gradients of inputs reach the first stage sooner, and the others compute weight gradients
# while the pipeline drains. The counterpart of `one_f_one_b` in samples: what one round of
# micro-batches of every earlier group holds. A plan may say how much waits, as it takes memory.


def most_delayed(plan: Plan, number: int, replica: int) -> int | None:
    """Most micro-batches of a replica whose weight gradients wait; None: they never do.

    With one chunk per group and equal groups, s for stage s, counted from 0.
    """
    group = plan.groups[number]
    if not group.split_backward:
        return None
    first = plan.chunks_of_group(number)[0]
    earlier = {chunk.group for chunk in plan.chunks[:first]}
    samples = sum(round_of(plan.groups[other]) for other in earlier)
    own = group.replicas[replica]
    most = -(-samples * own.num_microbatches // plan.global_batch_size)
    if own.max_delayed_wgrad is None:
        return most
    layers = max(plan.chunks[chunk].num_layers for chunk in plan.chunks_of_group(number))
    return min(most, own.max_delayed_wgrad // (own.micro_batch_size * max(1, layers)))
