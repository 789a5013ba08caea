"""From a plan to one list of actions per rank.

The lists are cut out of one sequence. In that sequence a transfer is a single event, which stands
after the computation that produces it and before the one that consumes it, and each rank's list is
the part of the sequence that the rank takes part in. So the first action of the sequence that is
not done yet can always be done: no order of execution can deadlock, not even if every send waited
for its receive. The receives are then started one computation earlier than that, so that they
overlap with it; where starting a receive never waits, as with gloo, this keeps the property (see
`validate`). NCCL's receives occupy a hardware queue until they are matched, so there they stay
where they are (`early_receives=False`).
"""

from itertools import pairwise

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.schedules.actions import COMPUTE, RECEIVES, Action, ActionLists, Kind
from zorse_megatron.schedules.one_f_one_b import in_flight_limits
from zorse_megatron.schedules.order import Event, Pipeline
from zorse_megatron.schedules.samples import Piece, micro_batches, pieces
from zorse_megatron.schema.plan import Plan


def unsupported(plan: Plan) -> tuple[Problem, ...]:
    """Everything that the plan file can say and that cannot be lowered yet, at once."""
    problems = []

    def refuse(where: str, found: str, expected: str, remedy: str) -> None:
        problems.append(Problem(where=where, found=found, expected=expected, remedy=remedy))

    if plan.schedule.name != "1f1b":
        refuse(
            "schedule.name",
            f"{plan.schedule.name!r}",
            "'1f1b'",
            "The other schedules are part of the format but not executed yet; use 1f1b.",
        )
    for number, group in enumerate(plan.groups):
        chunks = plan.chunks_of_group(number)
        if len(chunks) > 1:
            refuse(
                f"groups[{number}]",
                f"{len(chunks)} chunks {list(chunks)}",
                "one chunk per group under 1f1b",
                "Give the group one range of layers; several chunks need the interleaved "
                "schedule, which is not executed yet.",
            )
        for index, replica in enumerate(group.replicas):
            if len(replica.ranks) > 1:
                refuse(
                    f"groups[{number}].replicas[{index}].ranks",
                    f"{list(replica.ranks)}",
                    "one rank per replica",
                    "Tensor parallelism inside a plan is not executed yet; give each rank a "
                    "replica of its own.",
                )
        if group.recompute is not None and group.recompute.mode != "none":
            refuse(
                f"groups[{number}].recompute",
                f"mode {group.recompute.mode!r}",
                "no recompute setting",
                "Recompute per group is not executed yet; remove the setting, or use Megatron's "
                "--recompute-* flags for all groups alike.",
            )
        offload = group.offload
        if offload and (offload.parameters or offload.optimizer_state or offload.activations):
            refuse(
                f"groups[{number}].offload",
                "a setting that is on",
                "no offload",
                "Offload is not executed yet; remove the setting.",
            )
    return tuple(problems)


def refuse_unsupported(plan: Plan, source: str = "The plan") -> None:
    """Raise PlanError with everything in the plan that this version cannot execute."""
    problems = unsupported(plan)
    if problems:
        raise PlanError(f"{source} is valid but asks for what is not executed yet", problems)


def lower_plan(
    plan: Plan,
    *,
    forward_only: bool = False,
    tied: bool | None = None,
    early_receives: bool = True,
) -> ActionLists:
    """Lower a plan to action lists, for a training step or (forward_only) an evaluation step.

    `tied`: whether the embedding and the output weight are one; None takes it from the plan's
    model. `early_receives`: start receives one computation early; without it the lists run even
    where every transfer blocks. Raises PlanError with everything that cannot be lowered.
    """
    refuse_unsupported(plan)
    if tied is None:
        tied = bool(plan.model.tied_embeddings)
    sequence = _Sequence(plan)
    sequence.play(forward_only=forward_only)
    lists = [_receive_early(actions) if early_receives else actions for actions in sequence.lists]
    if not forward_only:
        lists = [actions + _update(plan, rank, tied=tied) for rank, actions in enumerate(lists)]
    return ActionLists(ranks=tuple(tuple(actions) for actions in lists))


class _Sequence:
    """Builds all ranks' lists as parts of one sequence of events."""

    def __init__(self, plan: Plan) -> None:
        self.groups = [plan.groups[chunk.group] for chunk in plan.chunks]
        self.global_batch_size = plan.global_batch_size
        self.layouts = [micro_batches(group) for group in self.groups]
        self.lists: list[list[Action]] = [[] for _ in range(plan.world_size)]
        self.outgoing: dict[tuple[int, int, int], list[Piece]] = {}
        self.incoming: dict[tuple[int, int, int], list[Piece]] = {}
        for chunk, (left, right) in enumerate(pairwise(self.layouts)):
            for piece in pieces(left, right):
                source, target = piece.source, piece.target
                self.outgoing.setdefault((chunk, source.replica, source.index), []).append(piece)
                self.incoming.setdefault((chunk + 1, target.replica, target.index), []).append(
                    piece
                )

    def play(self, *, forward_only: bool) -> None:
        limits = in_flight_limits(self.groups, self.global_batch_size)
        pipeline = Pipeline(self.layouts, limits, forward_only=forward_only)
        # A transfer happens when its producer ends; a computation when it starts. At equal
        # times transfers come first, because a computation may start on what just arrived.
        timeline: list[tuple[int, int, int, Event]] = []
        for number, event in enumerate(pipeline.play()):
            timeline.append((event.time, 1, number, event))
            timeline.append((event.end, 0, number, event))
        for _, starts, _, event in sorted(timeline, key=lambda entry: entry[:3]):
            if starts:
                self._compute(event)
            elif event.forward:
                self._activations(event)
            else:
                self._gradients(event)

    def _rank(self, chunk: int, replica: int) -> int:
        return self.groups[chunk].replicas[replica].ranks[0]

    def _compute(self, event: Event) -> None:
        rank = self._rank(event.chunk, event.micro_batch.replica)
        kind = Kind.FORWARD if event.forward else Kind.BACKWARD
        self.lists[rank].append(
            Action(kind=kind, chunk=event.chunk, micro_batch=event.micro_batch.index)
        )

    def _activations(self, event: Event) -> None:
        key = (event.chunk, event.micro_batch.replica, event.micro_batch.index)
        for piece in self.outgoing.get(key, ()):
            self._transfer(event.chunk, piece, gradient=False)

    def _gradients(self, event: Event) -> None:
        key = (event.chunk, event.micro_batch.replica, event.micro_batch.index)
        for piece in self.incoming.get(key, ()):
            self._transfer(event.chunk - 1, piece, gradient=True)

    def _transfer(self, chunk: int, piece: Piece, *, gradient: bool) -> None:
        """Append one transfer between `chunk` and `chunk + 1` to both ranks' lists."""
        lower = (chunk, piece.source, self._rank(chunk, piece.source.replica))
        upper = (chunk + 1, piece.target, self._rank(chunk + 1, piece.target.replica))
        sender, receiver = (upper, lower) if gradient else (lower, upper)
        kinds = (
            (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT)
            if gradient
            else (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
        )
        ends = ((sender, receiver, kinds[0]), (receiver, sender, kinds[1]))
        for (chunk_here, micro_batch, rank), (_, _, peer), kind in ends:
            self.lists[rank].append(
                Action(
                    kind=kind,
                    chunk=chunk_here,
                    micro_batch=micro_batch.index,
                    peer=peer,
                    samples=(piece.start, piece.stop),
                )
            )


def _receive_early(actions: list[Action]) -> list[Action]:
    """Start each receive before the computation that precedes it, so that the two overlap.

    Receives keep their order among themselves, hence on each pair of ranks.
    """
    moved: list[Action] = []
    insert_at = 0
    for action in actions:
        if action.kind in RECEIVES:
            moved.insert(insert_at, action)
            insert_at += 1
            continue
        if action.kind in COMPUTE:
            insert_at = len(moved)
        moved.append(action)
    return moved


def _update(plan: Plan, rank: int, *, tied: bool) -> list[Action]:
    """What a rank does after its last backward."""
    chunks = plan.chunks_of_group(plan.group_of_rank(rank))
    actions = [Action(kind=Kind.REDUCE, chunk=chunk) for chunk in reversed(chunks)]
    ends = {0, len(plan.chunks) - 1}
    if tied and len(plan.chunks) > 1 and ends & set(chunks):
        actions.append(Action(kind=Kind.TIE))
    actions += [Action(kind=Kind.SCALE), Action(kind=Kind.STEP)]
    actions += [Action(kind=Kind.GATHER, chunk=chunk) for chunk in chunks]
    return actions
