"""All ranks' lists as parts of one sequence: passes, unsharding and resharding, the update.

In the sequence a transfer is a single event, which stands after the computation that produces it
and before the one that consumes it; a collective is a single event of all ranks of its group; and
a computation is one of all ranks of a replica, as collectives are inside.
Each rank's list is the part of the sequence that the rank takes part in. So the first action of
the sequence that is not done yet can always be done: no order of execution can deadlock, not even
if every send waited for its receive and every collective for all of its ranks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zorse_megatron.plan.memory_settings import ranks_that_offload
from zorse_megatron.plan.plan import Plan, Replica
from zorse_megatron.schedule.actions import Action, Kind
from zorse_megatron.schedule.rank_messages import RankMessage, rank_messages
from zorse_megatron.schedule.samples import Boundaries, MicroBatch, Piece

# Events of a simulated schedule: computations of replicas, and actions of entire groups.
#
# Its time is exact, in integers, so that every rank finds the same order.


class Event(NamedTuple):
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
class GroupEvent:
    """Actions that all ranks of a group take at one moment, those without micro-batches too."""

    time: int
    group: int
    actions: tuple[Action, ...]


NS_PER_S = 10**9


class Durations:
    """How long computations and messages take while a schedule is simulated.

    In nanoseconds, where the plan gives `compute_s`. Otherwise the work is taken to be balanced:
    every group takes one unit for its part of the batch, each of its chunks in proportion to its
    layers, and a replica with n micro-batches 1/n of that for each, a third of it forward, a third
    for gradients of weights; messages take no time.
    """

    def __init__(self, plan: Plan) -> None:
        is_known = any(each.compute_s for group in plan.groups for each in group.replicas)
        self._chunks = _known(plan) if is_known else _balanced(plan)
        self._replicas = [plan.groups[chunk.group].replicas for chunk in plan.chunks]
        self._messages = [
            (round(NS_PER_S * each.latency_s), NS_PER_S * each.s_per_sample)
            if is_known and each is not None
            else (0, 0.0)
            for each in (chunk.transfer for chunk in plan.chunks)
        ]

    def of(self, kind: Kind, chunk: int, replica: int) -> int:
        """A forward, a backward or weight gradients of one micro-batch that is not halved."""
        return self._chunks[chunk][replica][_COLUMNS[kind]]

    def of_each(self, kind: Kind, chunk: int, replica: int) -> Sequence[int]:
        """Those of each micro-batch as it runs; a half takes its part."""
        whole, own = self.of(kind, chunk, replica), self._replicas[chunk][replica]
        if own.halved is None:
            return [whole] * own.num_microbatches
        of_sample = 2 * whole * own.halved.time_of_half / own.micro_batch_size
        return [
            whole if size == own.micro_batch_size else max(1, round(of_sample * size))
            for size in own.sizes
        ]

    def of_message(self, chunk: int, samples: int) -> int:
        """From `chunk` to the next one, or back."""
        latency, per_sample = self._messages[chunk]
        return latency + round(per_sample * samples)


_COLUMNS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.WEIGHT_GRADIENT: 2}
_ByReplica = dict[int, tuple[int, int, int]]
"""Replica with micro-batches -> forward, backward, weight gradients."""


def _known(plan: Plan) -> list[_ByReplica]:
    found: list[_ByReplica] = [{} for _ in plan.chunks]
    for number, replica, each in plan.numbered_replicas():
        rows = zip(plan.chunks_of_group(number), each.compute_s or (), strict=False)
        for chunk, seconds in rows:
            # At least 1: what a group does follows what ended before, not what starts then.
            forward, backward, weights = (max(1, round(NS_PER_S * each_s)) for each_s in seconds)
            found[chunk][replica] = forward, backward, weights
    return found


def _balanced(plan: Plan) -> list[_ByReplica]:
    layers = [chunk.num_layers for chunk in plan.chunks]
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
    found = []
    for chunk, count in zip(plan.chunks, layers, strict=True):
        backward = 1 if plan.groups[chunk.group].split_backward else 2
        forwards = {
            replica: count * (unit // (of_group[chunk.group] * n))
            for replica, n in counts[chunk.group].items()
        }
        found.append({replica: (f, backward * f, f) for replica, f in forwards.items()})
    return found


_TRANSFER, _ACT, _COMPUTE = range(3)
_ACTIVATION, _GRADIENT = (Kind.SEND_F, Kind.RECV_F), (Kind.RECV_B, Kind.SEND_B)
"""Of the lower chunk's rank, of the upper one's."""
_COPIES = frozenset({Kind.FETCH, Kind.OFFLOAD})


def cut_into_lists(
    plan: Plan, boundaries: Boundaries, events: Iterable[Event], group_events: Iterable[GroupEvent]
) -> list[list[Action]]:
    """Return one list of actions per rank."""
    sequence = _Sequence(plan, boundaries)
    # A transfer happens when its producer ends, a computation when it starts. At equal times
    # transfers come first, because a computation may start on what just arrived; and what a group
    # does comes after the computations that it waited for and before those that wait for it.
    timeline: list[tuple[int, int, int, Event | GroupEvent]] = []
    for number, event in enumerate(events):
        timeline.append((event.end, _TRANSFER, number, event))
        timeline.append((event.time, _COMPUTE, number, event))
    for number, group_event in enumerate(group_events):
        timeline.append((group_event.time, _ACT, number, group_event))
    timeline.sort()  # numbers differ, so events are not compared
    for _, stage, _, happening in timeline:
        if isinstance(happening, GroupEvent):
            sequence.act(happening)
        elif stage == _COMPUTE:
            sequence.compute(happening)
        else:
            sequence.transfer(happening)
    return sequence.lists


class _Sequence:
    def __init__(self, plan: Plan, boundaries: Boundaries) -> None:
        self.boundaries = boundaries
        self.replicas = [group.replicas for group in plan.groups]
        self.offloads_parameters = ranks_that_offload(plan, "parameters")
        self.lists: list[list[Action]] = [[] for _ in range(plan.world_size)]

    def compute(self, event: Event) -> None:
        """Append a forward, a backward or a weight gradient."""
        micro_batch = event.micro_batch
        action = Action(event.kind, event.chunk, micro_batch.index)
        for rank in self._replica(event.chunk, micro_batch).ranks:
            self.lists[rank].append(action)

    def act(self, event: GroupEvent) -> None:
        """Append what a whole group does to the lists of all its ranks.

        Copies of shards between GPU and host: of the ranks that offload parameters.
        """
        of_all = [action for action in event.actions if action.kind not in _COPIES]
        for replica in self.replicas[event.group]:
            for rank in replica.ranks:
                offloads = rank in self.offloads_parameters
                self.lists[rank] += event.actions if offloads else of_all

    def transfer(self, event: Event) -> None:
        """Append the sends of what a computation produced, and their receives."""
        if event.kind is Kind.WEIGHT_GRADIENT:
            return
        lower = event.chunk if event.forward else event.chunk - 1
        if not 0 <= lower < self.boundaries.last or self.boundaries.after_chunk[lower].is_local:
            return
        boundary = self.boundaries.after_chunk[lower]
        by_producer = boundary.by_source if event.forward else boundary.by_target
        for piece in by_producer[event.micro_batch.key]:
            replicas = self._replica(lower, piece.source), self._replica(lower + 1, piece.target)
            for message in rank_messages(piece, *replicas):
                self._transfer(lower, piece, message, gradient=not event.forward)

    def _transfer(self, chunk: int, piece: Piece, message: RankMessage, *, gradient: bool) -> None:
        """Append one transfer between `chunk` and `chunk + 1` to both ranks' lists."""
        lower, upper = message.source, message.target
        samples, positions = message.samples, message.positions
        at_lower, at_upper = _GRADIENT if gradient else _ACTIVATION
        self.lists[lower].append(
            Action(at_lower, chunk, piece.source.index, upper, samples, positions)
        )
        self.lists[upper].append(
            Action(at_upper, chunk + 1, piece.target.index, lower, samples, positions)
        )

    def _replica(self, chunk: int, micro_batch: MicroBatch) -> Replica:
        return self.replicas[self.boundaries.groups[chunk]][micro_batch.replica]


# When a group unshards and reshards its chunks' parameters.
#
# A group works through *units*: each is one chunk, whose parameters must be unsharded while it
# lasts. The chunk of the next unit is gathered while the current one runs, after the release of the
# previous one; so at most two chunks are unsharded at a time. A chunk that the next unit needs
# again is kept instead: it would be gathered again at once.
#
# With shards that wait in host memory, each is fetched one unit before it is gathered.


_FETCHED_AHEAD = 2
"""A chunk's shard is fetched this many units before the chunk is used, and gathered one before."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Work on one chunk between two moments at which a group changes what is unsharded."""

    chunk: int
    ends_backward: bool
    """Whether the chunk's last backward is in it, so that its gradients are complete."""


def between_units(
    units: Sequence[Unit], *, resident: bool, offload: bool
) -> list[tuple[Action, ...]]:
    """For each unit the group's actions before it, and last those at the end.

    `resident`: parameters stay unsharded, so that only gradients are reduced. `offload`: shards
    of some ranks wait in host memory; the others skip FETCH and OFFLOAD. The reduction comes
    first, because it frees the gradients before those of the unit after next are made.
    """
    chunks = [unit.chunk for unit in units]
    found = []
    for at in range(len(units) + 1):
        actions: list[Action] = []
        if at > 0 and units[at - 1].ends_backward:
            actions.append(Action(kind=Kind.REDUCE_GRAD, chunk=chunks[at - 1]))
        if not resident:
            actions += _moves(chunks, at, offload=offload)
        found.append(tuple(actions))
    return found


def _moves(chunks: Sequence[int], at: int, *, offload: bool) -> list[Action]:
    """RESHARD and OFFLOAD of the unit before `at`; UNSHARD and FETCH for those after it."""
    steps: list[tuple[Kind, int]] = []
    if at > 0 and not _is_kept(chunks, at):
        steps.append((Kind.RESHARD, chunks[at - 1]))
        if offload and chunks[at - 1] not in chunks[at : at + _FETCHED_AHEAD + 1]:
            steps.append((Kind.OFFLOAD, chunks[at - 1]))
    if at == 0 and offload:
        steps.append((Kind.FETCH, chunks[0]))
    if at < len(chunks) and (at == 0 or chunks[at] == chunks[at - 1]):
        steps.append((Kind.UNSHARD, chunks[at]))  # it had to wait for the release
    if at == 0 and offload and _is_fetched(chunks, 1):
        steps.append((Kind.FETCH, chunks[1]))
    if at + 1 < len(chunks) and chunks[at + 1] != chunks[at] and not _is_kept(chunks, at):
        steps.append((Kind.UNSHARD, chunks[at + 1]))
    if offload and _is_fetched(chunks, at + _FETCHED_AHEAD):
        steps.append((Kind.FETCH, chunks[at + _FETCHED_AHEAD]))
    return [Action(kind=kind, chunk=chunk) for kind, chunk in steps]


def _is_kept(chunks: Sequence[int], at: int) -> bool:
    """Whether the chunk of the unit before `at` is that of the unit after it, too."""
    return 0 < at < len(chunks) - 1 and chunks[at - 1] == chunks[at + 1] != chunks[at]


def _is_fetched(chunks: Sequence[int], at: int) -> bool:
    """Whether the shard is in host memory when it is time to fetch it for unit `at`."""
    first = max(0, at - _FETCHED_AHEAD - 1)
    return at < len(chunks) and chunks[at] not in chunks[first:at]


# What follows the passes: complete gradients, then the optimizer step.


def reductions(boundaries: Boundaries, events: Iterable[Event]) -> list[GroupEvent]:
    """A REDUCE_GRAD of each chunk when its gradients are there; those of one moment in reverse
    order."""
    ends = [0] * (boundaries.last + 1)
    for event in events:
        if not event.forward:
            ends[event.chunk] = max(ends[event.chunk], event.end)
    return [
        GroupEvent(
            time=ends[chunk],
            group=boundaries.groups[chunk],
            actions=(Action(kind=Kind.REDUCE_GRAD, chunk=chunk),),
        )
        for chunk in reversed(range(boundaries.last + 1))
    ]


def update_actions(plan: Plan, group: int, *, tied: bool, gathers: bool) -> list[Action]:
    """What a rank of a group does after its last reduction.

    The norm of the gradient is one of all chunks, so nothing steps before all are reduced. Then
    chunks step in the order in which the next iteration uses them. `gathers`: whether parameters
    are to be unsharded again.
    """
    chunks = plan.chunks_of_group(group)
    actions = []
    if tied and len(plan.chunks) > 1 and {0, len(plan.chunks) - 1} & set(chunks):
        actions.append(Action(kind=Kind.TIE))
    actions += [Action(kind=Kind.SCALE), Action(kind=Kind.NORM)]
    for chunk in chunks:
        actions.append(Action(kind=Kind.STEP, chunk=chunk))
        if gathers:
            actions.append(Action(kind=Kind.UNSHARD, chunk=chunk))
    return actions
