"""All ranks' lists as parts of one sequence of events.

In the sequence a transfer is a single event, which stands after the computation that produces it
and before the one that consumes it; a collective is a single event of all ranks of its group; and
a computation is one of all ranks of a tensor-parallel set, as collectives are inside.
Each rank's list is the part of the sequence that the rank takes part in. So the first action of
the sequence that is not done yet can always be done: no order of execution can deadlock, not even
if every send waited for its receive and every collective for all of its ranks.
"""

from collections.abc import Iterable
from operator import itemgetter

from zorse_megatron.schedules.actions import Action, Kind
from zorse_megatron.schedules.boundaries import Boundaries
from zorse_megatron.schedules.events import Event, GroupEvent
from zorse_megatron.schedules.samples import MicroBatch, Piece
from zorse_megatron.schedules.sequence_slices import SlicePair, slice_pairs
from zorse_megatron.schema.plan.memory_settings import ranks_that_offload_parameters
from zorse_megatron.schema.plan.plan import Plan

_TRANSFER, _ACT, _COMPUTE = range(3)
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
    timeline.sort(key=itemgetter(0, 1, 2))
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
        self.ranks = [[replica.ranks for replica in group.replicas] for group in plan.groups]
        """Group -> replica -> its ranks."""
        self.offloads_parameters = ranks_that_offload_parameters(plan)
        self.lists: list[list[Action]] = [[] for _ in range(plan.world_size)]

    def compute(self, event: Event) -> None:
        """Append a forward, a backward or a weight gradient."""
        micro_batch = event.micro_batch
        action = Action(kind=event.kind, chunk=event.chunk, micro_batch=micro_batch.index)
        for rank in self._ranks(event.chunk, micro_batch):
            self.lists[rank].append(action)

    def act(self, event: GroupEvent) -> None:
        """Append what a whole group does to the lists of all its ranks.

        Copies of shards between GPU and host: of the ranks that offload parameters.
        """
        of_all = [action for action in event.actions if action.kind not in _COPIES]
        for ranks in self.ranks[event.group]:
            for rank in ranks:
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
            lowers = self._ranks(lower, piece.source)
            uppers = self._ranks(lower + 1, piece.target)
            for pair in slice_pairs(len(lowers), len(uppers)):
                ends = lowers[pair.source], uppers[pair.target]
                self._transfer(lower, piece, ends, pair, gradient=not event.forward)

    def _transfer(
        self, chunk: int, piece: Piece, ends: tuple[int, int], pair: SlicePair, *, gradient: bool
    ) -> None:
        """Append one transfer between `chunk` and `chunk + 1` to both ranks' lists."""
        lower, upper = ends
        samples = piece.start, piece.stop
        kinds = (Kind.RECEIVE_GRADIENT, Kind.SEND_GRADIENT)
        self.lists[lower].append(
            Action(
                kind=kinds[0] if gradient else Kind.SEND_ACTIVATION,
                chunk=chunk,
                micro_batch=piece.source.index,
                peer=upper,
                samples=samples,
                positions=pair.positions,
            )
        )
        self.lists[upper].append(
            Action(
                kind=kinds[1] if gradient else Kind.RECEIVE_ACTIVATION,
                chunk=chunk + 1,
                micro_batch=piece.target.index,
                peer=lower,
                samples=samples,
                positions=pair.positions,
            )
        )

    def _ranks(self, chunk: int, micro_batch: MicroBatch) -> tuple[int, ...]:
        return self.ranks[self.boundaries.groups[chunk]][micro_batch.replica]
