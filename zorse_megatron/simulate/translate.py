"""From action lists to tasks: what each action occupies, and what it waits for.

The rules are the executor's (`runtime.executor`), and where the executor does not run an action
yet, those that its word in `schedule.actions` promises:

- A rank has one main stream, which runs its list in order. Beside it there are a collective
  stream, a copy stream to the host and one from the host, and one stream for each direction of
  each pair of ranks. On each stream things run one at a time, in list order.
- A forward or backward runs on the main stream, when the receives that it consumes have arrived
  and the UNSHARD and the FETCH of its chunk that precede it in the list are done. Of a sharded
  chunk each layer of a forward waits for its own parameters (`action_costs`).
- A weight gradient takes its part of the backward, which where it stands apart takes the rest.
- A computation of a tensor-parallel group is one task of all its ranks: it starts when all are
  ready, and between collectives takes as long as on the slowest. Collectives inside layers take
  idle links. A TP group without sequence parallelism gathers what arrived in parts first. So do
  ranks that share experts, but for what each computes alone: before tokens first leave it, after
  they were last there, dense layers of one half before tokens of the other come, and weight
  gradients that stand apart.
- Where replicas of a group cut their layers differently, its REDUCE_GRADs and UNSHARDs stop the
  main stream.
- Sends and receives only start a transfer and take no time. The transfer runs when the sender has
  come to its send, the receiver has opened the buffer (`schedule.transfer_windows`), and the one
  before it on the same pair and direction is done. With a `Framework` whose transfers block, a
  receive starts at its place, and each stops the main stream until it is done (and a receive until
  the tensor is rebuilt).
- A send must have left before the computation at which it is closed (`schedule.transfer_windows`),
  or before NORM: the main stream waits there.
- REDUCE_GRAD and UNSHARD run on the collective stream, after everything that precedes them in the
  list: they start when all ranks of the group are there, and end on all at once; in a hierarchical
  group each rank waits for its own stages (`shared_tasks`). The main stream goes on; so they
  overlap with computation, unless what follows waits for them. A REDUCE_GRAD of a chunk that is
  released, or in 16 bits, stops the main stream until the REDUCE_GRAD before it is done, as each of
  them needs memory of its own.
- TIE, SCALE and NORM run on the main stream, after the rank's collectives and FETCHes. TIE swaps
  gradients between owners of the same elements, and ends with the rank's last swap. SCALE and NORM
  are sums of a few numbers over all ranks (`Framework`), or NORM takes no time.
- Lists are taken from NORM to NORM (`schedule.actions`): first what they have behind it, beside the
  first passes of the next iteration.
- STEP runs on the main stream. State that stays in the host passes through the GPU piece by piece
  meanwhile, and parameters whose shard is in the host come and go with their chunk's pieces
  (`ActionCosts.stepped_s`).
- An OFFLOAD_GRAD stops the main stream until the REDUCE_GRAD before it is done and the shard of the
  OFFLOAD_GRAD before it has left; then the shard is copied on the copy stream to the host, beside
  all else. SCALE waits for the last one, and begins with copies of all of them from the host.
- Behind the update the loss is summed over the last group, whose ranks wait for that, and sent to
  the job's last rank, which waits for it; where a `Framework` sums more over all ranks, all wait.
  The sum comes behind the group's UNSHARDs, unless it is hierarchical: these have communicators of
  their own.
- OFFLOAD and FETCH run on the copy streams, which overlap with all else. An OFFLOAD waits for the
  chunk's UNSHARD and FETCH, a FETCH for its OFFLOAD. A UNSHARD stops the main stream until the
  chunk's FETCH is done, and an OFFLOAD that copies until it has. RESHARD takes no time and waits
  for the chunk's UNSHARD.
- With `offload.activations`, what a forward keeps is copied to the host after it. The copy back is
  asked for as the computation before the backward begins, before what follows in the list. At the
  end of the next forward the main stream waits until it has left. See
  `schedule.transfer_windows` for what stays.

Computation and communication do not slow each other down here: on a GPU, NCCL's kernels take some
of its processors.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from zorse_megatron.costs.expert_passes import ExpertPass
from zorse_megatron.schedule.actions import (
    COMPUTE,
    ON_LAYERS,
    RECEIVES,
    TRANSFERS,
    Action,
    Kind,
    from_norm,
    num_before_update,
)
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at
from zorse_megatron.simulate.action_costs import EVERYTHING, ActionCosts, GatherPart, gather_parts
from zorse_megatron.simulate.assumptions import Pace, Perturbation
from zorse_megatron.simulate.residency import Residency
from zorse_megatron.simulate.shared_tasks import (
    CollectiveTasks,
    HostCopyTasks,
    StageTasks,
    TpTasks,
)
from zorse_megatron.simulate.tasks import NOTHING, Program, Role, Streams, TaskGraph, Track, live
from zorse_megatron.simulate.transfers import (
    MatchedTransfers,
    gradients_waited_at,
    with_receives_at_last,
    with_receives_posted,
)


def translate(
    lists: Mapping[int, Sequence[Action]],
    costs: ActionCosts,
    perturbation: Perturbation,
    *,
    stands_in: Sequence[int],
) -> Program:
    """Make tasks of the lists; `lists`: rank -> its actions.

    `stands_in`: rank -> that of them whose list stands for its own.

    Raises SimulationError where the lists of different ranks do not fit together.
    """
    graph = TaskGraph()
    collectives = CollectiveTasks(graph, costs, lists, stands_in)
    transfers = MatchedTransfers(graph, costs.sizes, costs.loads)
    tp_tasks = TpTasks(graph)
    tracks = {}
    for rank, actions in lists.items():
        translator = RankTranslator(
            rank=rank,
            actions=from_norm(actions),
            num_updating=len(actions) - num_before_update(actions),
            collectives=collectives,
            transfers=transfers,
            tp_tasks=tp_tasks,
            perturbation=perturbation,
        )
        tracks[rank] = translator.translate()
    transfers.match(tracks)
    collectives.check()
    tp_tasks.check()
    return Program(graph=graph, tracks=tracks, capacities_bytes_per_s=costs.loads.capacities)


# The tasks of one rank's list; the rules are those of `translate`.


_PAIRS = (
    {Kind.SEND_F, Kind.RECV_B},
    {Kind.SEND_B, Kind.RECV_F},
)


class RankTranslator:
    """Makes tasks of one rank's list."""

    def __init__(
        self,
        *,
        rank: int,
        actions: tuple[Action, ...],
        num_updating: int,
        collectives: CollectiveTasks,
        transfers: MatchedTransfers,
        tp_tasks: TpTasks,
        perturbation: Perturbation,
    ) -> None:
        """`actions`: from NORM to NORM; `num_updating`: how many of them update."""
        self.rank = rank
        self.num_updating = num_updating
        self.graph = collectives.graph
        self.collectives = collectives
        self.costs = collectives.costs
        self.sizes = self.costs.sizes
        framework = self.sizes.framework
        self.as_megatron = framework.interleaves_as_megatron
        if self.as_megatron or framework.paired_transfers:
            posted = with_receives_posted if self.as_megatron else with_receives_at_last
            actions = (*actions[:num_updating], *posted(actions[num_updating:]))
        self.transfers = transfers
        self.residency = Residency(self.sizes, rank, actions)
        self.track = Track(
            rank=rank,
            actions=actions,
            residency=self.residency,
            posted_at=self._posted_at(actions),
            waited_at=self._waited_at(actions),
        )
        self.blocks, self.pairs = framework.blocking_transfers, framework.paired_transfers
        factor = perturbation.rank_factor(rank, self.costs.kinds[rank])
        self.pace = perturbation.jitter_of(rank, factor)
        self.streams = Streams(rank=rank, graph=self.graph, track=self.track)
        self.stages = StageTasks(collectives, self.streams)
        self.passes = PassTasks(self.streams, self.costs, tp_tasks, self.pace)
        self.reduction = NOTHING
        """The last one."""
        self.stepped_s: Mapping[int, float] = {}
        """Chunk -> how long its part of the update stops the main stream."""
        self.late_gathers: dict[int | None, int] = {}
        """Chunk -> position of a gather that its first forward starts."""
        self.counts: Counter[tuple[Kind, int | None]] = Counter()
        self.arriving: dict[int | None, Sequence[tuple[GatherPart, int]]] = {}
        """Chunk -> the parts of a UNSHARD that the main stream has not waited for yet."""
        self.pending: dict[int | None, int] = {}
        """Chunk -> a FETCH of parameters of which the same is true."""
        self.copies = HostCopyTasks(self.streams, self.costs, self.residency, self.pending)

    def translate(self) -> Track:
        """Go through the list once."""
        before, tasks = self.track.before, self.track.tasks
        for position, action in enumerate(self.track.actions):
            if position == self.num_updating and position:
                self._report()
            before.append(self.streams.main)
            tasks.append(NOTHING)
            kind = action.kind
            if kind in TRANSFERS:
                self._transfer(position, action)
                continue  # the task is known when its other end is
            if kind in ON_LAYERS:
                task = self._compute(position, action)
            elif kind in (Kind.REDUCE_GRAD, Kind.UNSHARD):
                if position < self.num_updating and not self.sizes.framework.gathers_ahead:
                    self.late_gathers[action.chunk] = position
                    continue
                task = self._collective(position, action)
            elif kind is Kind.STEP:
                task = self._step(position, action)
            elif kind in (Kind.OFFLOAD, Kind.FETCH):
                task = self.copies.move(position, action)
            elif kind is Kind.OFFLOAD_GRAD:
                task = self.copies.send_gradients(position, action, after=self.reduction)
            else:
                task = self._blocking(position, action)
            tasks[position] = task
        return self.track

    def _posted_at(self, actions: Sequence[Action]) -> Mapping[int, int]:
        framework = self.sizes.framework
        in_place = framework.blocking_transfers or self.as_megatron
        ahead = 0 if in_place else framework.receives_ahead
        return self._in_passes(receives_posted_at(actions[self.num_updating :], ahead=ahead))

    def _waited_at(self, actions: Sequence[Action]) -> Mapping[int, int]:
        framework = self.sizes.framework
        if framework.blocking_transfers:
            return {}
        passes = actions[self.num_updating :]
        if self.as_megatron:
            return self._in_passes(gradients_waited_at(passes))
        return self._in_passes(sends_waited_at(passes, behind=framework.sends_behind))

    def _in_passes(self, places: Mapping[int, int]) -> Mapping[int, int]:
        """Places in the list as the runtime begins it, with its passes, in that from NORM."""
        before = self.num_updating
        return {each + before: other + before for each, other in places.items()}

    def _transfer(self, position: int, action: Action) -> None:
        after = self.track.before[self.track.posted_at.get(position, position)]
        if self.pairs and self._is_second(position):
            after = self.track.before[position - 1]
        stops = self.blocks or (self.as_megatron and action.kind is Kind.SEND_F)
        gate = self._stop(position, action) if stops else NOTHING
        self.transfers.start(action, rank=self.rank, position=position, after=after, gate=gate)

    def _is_second(self, position: int) -> bool:
        """Whether a receive goes with the send before it: one of a gradient, one not."""
        pair = {action.kind for action in self.track.actions[max(0, position - 1) : position + 1]}
        return pair in _PAIRS

    def _stop(self, position: int, action: Action) -> int:
        """What the main stream waits for at a blocking transfer, and what it then does."""
        rate = self.sizes.framework.rebuild_bytes_per_s
        seconds_s = 0.0
        if rate is not None and action.kind in RECEIVES:
            seconds_s = self.sizes.crossing_bytes(action) / rate
        return self.streams.run(position, Role.COPY, seconds_s)

    def _compute(self, position: int, action: Action) -> int:
        assert action.chunk is not None
        forward = action.kind is Kind.FORWARD
        self._gather_late(action.chunk)
        parts = self._arriving(action)
        own = live([parts[0][1], self.pending.pop(action.chunk, None)])
        if action.kind in COMPUTE:
            self.copies.bring_back(position)
        if action.kind is Kind.BACKWARD:
            own += live([self.copies.coming.pop((action.chunk, action.micro_batch), None)])
        if own:
            self.track.own[position] = own
        (first, _), *others = parts
        rest = [(part, (arrived,)) for part, arrived in others]
        tasks = self.passes.add(position, [(first, own), *rest])
        if action.kind in COMPUTE:
            self.transfers.consumers[self.rank, *action.computation] = tasks[0], position
        if forward:
            self.copies.send_activations(position, action)
        return tasks[-1]

    def _arriving(self, action: Action) -> Sequence[tuple[GatherPart, int]]:
        """What a computation waits for of its chunk's UNSHARD; other than a forward, for all."""
        parts = self.arriving.pop(action.chunk, ())
        if action.kind is Kind.FORWARD and len(parts) > 1:
            return parts
        return [(EVERYTHING, parts[-1][1] if parts else NOTHING)]

    def _gather_late(self, chunk: int) -> None:
        """Start the gather that a framework has left to the chunk's first forward."""
        at = self.late_gathers.pop(chunk, None)
        if at is not None:
            self.track.tasks[at] = self._collective(at, self.track.actions[at])

    def _collective(self, position: int, action: Action) -> int:
        staged = self.stages.are_made(action)
        own = self.stages.before if staged else live([self.streams.collective])
        fetched: tuple[int, ...] = ()
        if action.kind is Kind.REDUCE_GRAD:
            self._wait_for_reduction(position, action.chunk)
        else:
            fetched = live([self.pending.pop(action.chunk, None)])
            if fetched:
                self.streams.run(position, Role.COPY, 0.0, *fetched)
        own = self.track.own[position] = own + fetched
        assert action.chunk is not None
        parts: Sequence[GatherPart] = (EVERYTHING,)
        if action.kind is Kind.UNSHARD:
            parts = gather_parts(self.sizes, self.rank, action.chunk)
        if staged:
            tasks = self.stages.join(position, action, parts, *fetched)
        else:
            after = self.streams.main, *own
            tasks = self._join(position, action.kind, action.chunk, *after, parts=parts)
        self.streams.collective = tasks[-1]
        if self.sizes.mixed_tp[action.chunk] is not None:
            self.streams.on_main(tasks[-1])
        if action.kind is Kind.REDUCE_GRAD:
            self.reduction = tasks[-1]
        else:
            self.arriving[action.chunk] = list(zip(parts, tasks, strict=True))
            self.copies.last[action.kind, action.chunk] = tasks[-1]
        return tasks[-1]

    def _wait_for_reduction(self, position: int, chunk: int | None) -> None:
        """Before a reduction that needs memory of its own, the one before must have ended."""
        assert chunk is not None
        frees = chunk in self.residency.resharded or self.sizes.reduces_beside(chunk)
        if frees and self.reduction != NOTHING:
            self.streams.run(position, Role.COPY, 0.0, self.reduction)

    def _blocking(self, position: int, action: Action) -> int:
        streams = self.streams
        if action.kind is Kind.RESHARD:
            own = live([self._arriving(action)[0][1]])
            if own:
                self.track.own[position] = own
            return streams.run(position, Role.COMPUTE, 0.0, *own)
        leaving = self.copies.shard_out if action.kind is Kind.SCALE else NOTHING
        own = self.track.own[position] = live([streams.collective, streams.from_host, leaving])
        if action.kind is Kind.TIE:
            return self._tie(position, own)
        if action.kind is Kind.SCALE:
            own = self.copies.read_for_norm(position, own)
        return streams.on_main(*self._join(position, action.kind, None, streams.main, *own))

    def _step(self, position: int, action: Action) -> int:
        """The chunk's part of the update; what passes through the GPU is on its way before."""
        assert action.chunk is not None
        if not self.stepped_s:
            whole_s = self.costs.step_s(self.rank) * self.pace.draw()
            self.stepped_s = self.costs.stepped_s(self.rank, self.residency.stepped, whole_s)
        seconds_s = self.stepped_s[action.chunk]
        return self.streams.run(position, Role.COMPUTE, seconds_s)

    def _report(self) -> None:
        """Behind the update. Where only the loss is summed, the last group waits for its gathers if
        they run on the same communicator, as those of a hierarchical group do not."""
        at, plan = len(self.track.actions), self.sizes.plan
        last = plan.chunks[-1].group
        if self.sizes.framework.sums_after_step:
            self.streams.on_main(*self._join(at, Kind.STEP, None, self.streams.main))
        elif self.sizes.group_and_replica[self.rank][0] == last:
            is_hierarchical = self.sizes.is_hierarchical(len(plan.chunks) - 1)
            gathered = () if is_hierarchical else live([self.streams.collective])
            (task,) = self._join(at, Kind.STEP, len(plan.chunks) - 1, self.streams.main, *gathered)
            self.streams.collective = self.streams.on_main(task)
        self.streams.main = self.collectives.tell_loss((self.rank, at), self.streams.main)

    def _tie(self, position: int, own: tuple[int, ...]) -> int:
        start = self.streams.run(position, Role.COLLECTIVE, 0.0, *own)
        end = self.streams.run(position, Role.COLLECTIVE, 0.0)
        for peer, num_bytes in self.sizes.tied_swaps.get(self.rank, ()):
            self.transfers.swap(
                rank=self.rank,
                position=position,
                peer=peer,
                num_bytes=num_bytes,
                after=start,
                waiter=end,
            )
        return end

    def _join(
        self,
        position: int,
        kind: Kind,
        chunk: int | None,
        *after: int,
        parts: Sequence[GatherPart] = (EVERYTHING,),
    ) -> tuple[int, ...]:
        number = self.counts[kind, chunk]
        self.counts[kind, chunk] += 1
        first = 0 if chunk is None else self.sizes.peers_of(self.rank, chunk)[0]
        key, owner = (kind, chunk, number, first), (self.rank, position)
        tasks = self.collectives.join(key, owner, parts, *after)
        self.track.communication.extend(tasks)
        if len(tasks) > 1:
            self.track.starts[position] = tasks[0]
        return tasks


# Forwards, backwards and weight gradients: tasks of the main stream.


class PassTasks:
    """Those of one rank."""

    def __init__(self, streams: Streams, costs: ActionCosts, tp_tasks: TpTasks, pace: Pace) -> None:
        """`pace`: how much longer each takes than the costs say."""
        self.streams = streams
        self.rank, self.track = streams.rank, streams.track
        self.costs = costs
        self.tp_tasks = tp_tasks
        self.pace = pace
        self.set = costs.sizes.replica(self.rank).ranks
        self.shares_experts = costs.sizes.replica(self.rank).expert_parallel is not None
        self.times_s: dict[tuple[int, Kind, int, GatherPart | None], Sequence[float]] = {}
        """(chunk, kind, samples, part of it or None) -> what its phases take, without a
        perturbation."""
        actions = self.track.actions
        self.split = {each.chunk for each in actions if each.kind is Kind.WEIGHT_GRADIENT}
        """Chunks whose weight gradients are computed apart."""

    def add(
        self, position: int, parts: Sequence[tuple[GatherPart, tuple[int, ...]]]
    ) -> Sequence[int]:
        """Add an action in parts, each of which also waits for tasks; returns its tasks."""
        action, owner = self.track.actions[position], (self.rank, position)
        factor = self.pace.draw()
        tasks: list[int] = []
        for number, (part, after) in enumerate(parts):
            if self.shares_experts and action.kind in COMPUTE:
                assert part is EVERYTHING, "what is packed is waited for as a whole"
                tasks += self._around_exchanges(position, factor, after)
                continue
            phases_s, main = self._phases_s(action, part), self.streams.main
            if factor != 1.0:
                phases_s = [factor * each for each in phases_s]
            if len(self.set) > 1 and not self.shares_experts:
                inside_s = part.layers * self._inside_s(action)
                task = self.tp_tasks.join(
                    self.set, action, owner, phases_s, inside_s, main, *after, part=number
                )
            else:
                task = self.streams.graph.add(owner, Role.COMPUTE, sum(phases_s), main, *after)
            tasks.append(self.streams.on_main(task))
        if len(tasks) > 1:
            self.track.starts[position] = tasks[0]
        return tasks

    def _around_exchanges(
        self, position: int, factor: float, after: tuple[int, ...]
    ) -> Sequence[int]:
        """Of a rank that shares experts: others are waited for between the first exchange and the
        last one only, and not where all layers are dense."""
        action, owner = self.track.actions[position], (self.rank, position)
        assert action.chunk is not None
        together = self.costs.expert_pass(
            self.set,
            action.chunk,
            action.kind,
            self._size(action),
            splits=action.chunk in self.split,
        )
        if together.apart_s is not None:
            return self._apart(position, factor, after, together, together.apart_s)
        first_s, last_s = self._ends_s(action)
        before_s, between_s, behind_s, *_ = self._phases_s(action, EVERYTHING)
        before_s, behind_s = first_s + before_s, behind_s + last_s
        exchanging, _ = self.costs.between_experts.exchanging(self.rank, action.chunk)
        if not exchanging:
            seconds_s = factor * (before_s + behind_s)
            return [self.streams.run(position, Role.COMPUTE, seconds_s, *after)]
        tasks: list[int] = []
        if before_s:
            tasks.append(self.streams.run(position, Role.COMPUTE, factor * before_s, *after))
        inside_s, main = self._inside_s(action), self.streams.main
        task = self.tp_tasks.join(
            self.set, action, owner, [factor * between_s], inside_s, main, *after
        )
        tasks.append(self.streams.on_main(task))
        if behind_s:
            tasks.append(self.streams.run(position, Role.COMPUTE, factor * behind_s))
        return tasks

    def _apart(
        self,
        position: int,
        factor: float,
        after: tuple[int, ...],
        together: ExpertPass,
        apart_s: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        """See `ExpertPass.apart_s`: a task of each rank, which starts when the others let it.

        A rank takes part in all of them: behind what its coming adds to the least of any.
        """
        action, owner = self.track.actions[position], (self.rank, position)
        index = self.set.index(self.rank)
        first_s, last_s = self._ends_s(action)
        begun = self.streams.run(position, Role.COMPUTE, factor * first_s, *after)
        before_s, between_s, _ = together.of_rank(index)
        tasks: list[int] = []
        for other, takes_s in enumerate(zip(*apart_s, strict=True)):
            least_s = min(takes_s)
            behind_s = together.behind_s[other]
            # Only what it computes itself takes as long as its pace says.
            late_s = takes_s[index] - least_s + (factor - 1.0) * before_s
            come = self.streams.graph.add(owner, Role.COMPUTE, max(0.0, late_s), begun)
            if other == index:  # what it computes before others let it go on
                self.streams.on_main(come)
            # Of a task, exchanges and what all wait for; what its rank then has left follows.
            rest_s = least_s - max(together.computed_s) - behind_s + min(0.0, late_s)
            phases_s = [max(0.0, rest_s + factor * between_s), 0.0]
            if other == index:
                phases_s[1] = factor * behind_s
            tasks.append(
                self.tp_tasks.join(self.set, action, owner, phases_s, 0.0, come, part=other)
            )
        own = self.streams.on_main(tasks[index])
        self.streams.graph.owner[own] = owner
        return [begun, own, self.streams.run(position, Role.COMPUTE, factor * last_s)]

    def _ends_s(self, action: Action) -> tuple[float, float]:
        """What a rank that shares experts computes before all layers and behind them."""
        chunk, sizes = action.chunk, self.costs.sizes
        assert chunk is not None
        _, _, _, *ends = self._phases_s(action, EVERYTHING)
        first = ends[0] if chunk == 0 else 0.0
        last = ends[-1] if sizes.is_last(chunk) else 0.0
        return (first, last) if action.kind is Kind.FORWARD else (last, first)

    def _phases_s(self, action: Action, part: GatherPart) -> Sequence[float]:
        """See `ActionCosts.seconds` and `forward_part_s`."""
        chunk, kind, size = action.chunk, action.kind, self._size(action)
        assert chunk is not None
        key = chunk, kind, size, None if part is EVERYTHING else part
        found = self.times_s.get(key)
        if found is None:
            if part is EVERYTHING:
                splits = chunk in self.split
                found = self.costs.seconds(self.rank, chunk, kind, size, splits=splits)
            else:
                found = self.costs.forward_part_s(self.rank, chunk, size, part)
            self.times_s[key] = found
        return found

    def _size(self, action: Action) -> int:
        """Samples of the micro-batch."""
        assert action.micro_batch is not None
        return self.costs.sizes.size_of(self.rank, action.micro_batch)

    def _inside_s(self, action: Action) -> float:
        """What the TP group communicates in a computation; gathers for weight gradients overlap."""
        if action.kind is Kind.WEIGHT_GRADIENT:
            return 0.0
        assert action.chunk is not None
        gathers = not self.costs.sizes.has_own_input(action)
        inside = self.costs.tp_collectives(
            self.set, action.chunk, self._size(action), gathers=gathers
        )
        return float(inside.forward_s if action.kind is Kind.FORWARD else inside.backward_s)
