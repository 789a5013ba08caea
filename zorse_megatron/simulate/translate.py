"""From action lists to tasks: what each action occupies, and what it waits for.

The rules are the executor's (`runtime.executor`), and where the executor does not run an action
yet, those that its word in `schedules.actions` promises:

- A rank has one main stream, which runs its list in order. Beside it there are a collective
  stream, a copy stream to the host and one from the host, and one stream for each direction of
  each pair of ranks. On each stream things run one at a time, in list order.
- A forward or backward runs on the main stream, when the receives that it consumes have arrived
  and the GATHER and the FETCH of its chunk that precede it in the list are done.
- A weight gradient takes its part of the backward, which where it stands apart takes the rest.
- A computation of a tensor-parallel set is one task of all its ranks: it starts when all are ready,
  and between collectives takes as long as on the slowest. Collectives inside layers take idle
  links. A set without sequence parallelism gathers what arrived in parts first.
- Where replicas of a group cut their layers differently, its REDUCEs and GATHERs stop the main
  stream.
- Sends and receives only start a transfer and take no time. The transfer runs when the sender has
  come to its send, the receiver has opened the buffer (`schedules.receive_openings`), and the one
  before it on the same pair and direction is done. With a `Framework` whose transfers block, a
  receive starts at its place, and each stops the main stream until it is done (and a receive until
  the tensor is rebuilt).
- A send must have left before the computation at which it is closed (`schedules.send_closings`), or
  before NORM: the main stream waits there.
- REDUCE and GATHER run on the collective stream, after everything that precedes them in the list:
  they start when all ranks of the group are there, and end on all at once. The main stream goes
  on; so they overlap with computation, unless what follows waits for them. A REDUCE of a chunk that
  is released, or in 16 bits, stops the main stream until the REDUCE before it is done, as each of
  them needs memory of its own.
- TIE, SCALE and NORM run on the main stream, after the rank's collectives and FETCHes. TIE swaps
  gradients between owners of the same elements, and ends with the rank's last swap. SCALE is sums
  of one number over all ranks (`Framework`), NORM such a sum.
- Lists are taken from NORM to NORM (`schedules.steady`): first what they have behind it, beside the
  first passes of the next iteration.
- STEP runs on the main stream. State that stays in the host passes through the GPU piece by piece
  meanwhile, and parameters whose shard is in the host come and go with their chunk's pieces
  (`ActionCosts.stepped_s`).
- An OFFLOADG stops the main stream until the REDUCE before it is done and the shard of the OFFLOADG
  before it has left; then the shard is copied on the copy stream to the host, beside all else.
  SCALE waits for the last one. NORM begins with copies of all of them from the host.
- Behind the update the loss is summed over the last group, whose ranks wait for that, and sent to
  the job's last rank, which waits for it; where a `Framework` sums more over all ranks, all wait.
- OFFLOAD and FETCH run on the copy streams, which overlap with all else. An OFFLOAD waits for the
  chunk's GATHER and FETCH, a FETCH for its OFFLOAD. A GATHER stops the main stream until the
  chunk's FETCH is done, and an OFFLOAD that copies until it has. RELEASE takes no time and waits
  for the chunk's GATHER.
- With `offload.activations`, what a forward keeps is copied to the host after it, when what the
  forward before it kept has left, and back one computation before the backward, as a receive would
  be started; not where the backward is the next computation.

Computation and communication do not slow each other down here: on a GPU, NCCL's kernels take some
of its processors.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from zorse_megatron.schedules.actions import COMPUTE, ON_LAYERS, RECEIVES, TRANSFERS, Action, Kind
from zorse_megatron.schedules.receive_openings import receive_openings
from zorse_megatron.schedules.send_closings import send_closings
from zorse_megatron.schedules.steady import from_norm, num_before_update
from zorse_megatron.simulate.action_costs import ActionCosts
from zorse_megatron.simulate.collective_tasks import CollectiveTasks
from zorse_megatron.simulate.perturb import Perturbation
from zorse_megatron.simulate.residency import Residency
from zorse_megatron.simulate.set_tasks import SetTasks
from zorse_megatron.simulate.task_graph import NOTHING, Program, Role, TaskGraph, Track, live
from zorse_megatron.simulate.transfers import MatchedTransfers

_PAIRS = (
    {Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT},
    {Kind.SEND_GRADIENT, Kind.RECEIVE_ACTIVATION},
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
    sets = SetTasks(graph)
    tracks = {}
    for rank, actions in lists.items():
        translator = _RankTranslator(
            rank=rank,
            actions=from_norm(actions),
            num_updating=len(actions) - num_before_update(actions),
            collectives=collectives,
            transfers=transfers,
            sets=sets,
            perturbation=perturbation,
        )
        tracks[rank] = translator.translate()
    transfers.match(tracks)
    collectives.check()
    sets.check()
    return Program(graph=graph, tracks=tracks, capacities_bytes_per_s=costs.loads.capacities)


class _RankTranslator:
    """Makes tasks of one rank's list."""

    def __init__(
        self,
        *,
        rank: int,
        actions: tuple[Action, ...],
        num_updating: int,
        collectives: CollectiveTasks,
        transfers: MatchedTransfers,
        sets: SetTasks,
        perturbation: Perturbation,
    ) -> None:
        """`actions`: from NORM to NORM; `num_updating`: how many of them update."""
        self.rank = rank
        self.num_updating = num_updating
        self.graph = collectives.graph
        self.collectives = collectives
        self.costs = collectives.costs
        self.sizes = self.costs.sizes
        self.transfers = transfers
        self.sets = sets
        self.residency = Residency(self.sizes, rank, actions)
        self.track = Track(
            rank=rank,
            actions=actions,
            residency=self.residency,
            openings=self._openings(actions),
            closings=self._closings(actions),
        )
        framework = self.sizes.framework
        self.blocks, self.pairs = framework.blocking_transfers, framework.paired_transfers
        self.blocks_activations = framework.blocking_activations
        self.set = self.sizes.set_of(rank)
        self.times_s: dict[tuple[int, Kind], Sequence[float]] = {}
        """(chunk, kind) -> what its phases take, without a perturbation."""
        self.factor = perturbation.rank_factor(rank, self.costs.kinds[rank])
        self.jitter = perturbation.jitter_of(rank)
        self.is_perturbed = bool(perturbation.jitter) or self.factor != 1.0
        self.main = self.collective = self.to_host = self.from_host = NOTHING
        self.last_out = self.reduction = self.shard_out = NOTHING
        """The last copies of activations and of a shard of gradients to the host, and the last
        reduction."""
        self.split = {a.chunk for a in actions if a.kind is Kind.WEIGHT_GRADIENT}
        """Chunks whose weight gradients are computed apart."""
        self.stepped_s: Mapping[int, float] = {}
        """Chunk -> how long its part of the update stops the main stream."""
        self.late_gathers: dict[int | None, int] = {}
        """Chunk -> position of a gather that its first forward starts."""
        self.pending: dict[tuple[Kind, int | None], int] = {}
        """GATHERs and FETCHes of parameters that the main stream has not waited for yet."""
        self.copies: dict[tuple[Kind, int | None], int] = {}
        """The last GATHER, OFFLOAD and FETCH of each chunk, for the copies after it."""
        self.counts: dict[tuple[Kind, int | None], int] = {}
        self.copied_out: dict[tuple[int | None, int | None], int] = {}
        computations = [(at, a) for at, a in enumerate(actions) if a.kind in COMPUTE]
        self.previous = {later[0]: earlier[0] for earlier, later in pairwise(computations)}
        self.offloaded = self._offloaded([action for _, action in computations])

    def translate(self) -> Track:
        """Go through the list once."""
        before, tasks = self.track.before, self.track.tasks
        for position, action in enumerate(self.track.actions):
            if position == self.num_updating and position:
                self._report()
            before.append(self.main)
            tasks.append(NOTHING)
            kind = action.kind
            if kind in TRANSFERS:
                self._transfer(position, action)
                continue  # the task is known when its other end is
            if kind in ON_LAYERS:
                task = self._compute(position, action)
            elif kind in (Kind.REDUCE, Kind.GATHER):
                if position < self.num_updating and not self.sizes.framework.gathers_ahead:
                    self.late_gathers[action.chunk] = position
                    continue
                task = self._collective(position, action)
            elif kind is Kind.STEP:
                task = self._step(position, action)
            elif kind in (Kind.OFFLOAD, Kind.FETCH):
                task = self._copy(position, action)
            elif kind is Kind.OFFLOAD_GRADIENTS:
                task = self._offload_gradients(position, action)
            else:
                task = self._blocking(position, action)
            tasks[position] = task
        return self.track

    def _openings(self, actions: Sequence[Action]) -> Mapping[int, int]:
        framework = self.sizes.framework
        ahead = 0 if framework.blocking_transfers else framework.receives_ahead
        return self._in_passes(receive_openings(actions[self.num_updating :], ahead=ahead))

    def _closings(self, actions: Sequence[Action]) -> Mapping[int, int]:
        framework = self.sizes.framework
        if framework.blocking_transfers:
            return {}
        passes = actions[self.num_updating :]
        return self._in_passes(send_closings(passes, behind=framework.sends_behind))

    def _in_passes(self, places: Mapping[int, int]) -> Mapping[int, int]:
        """Places in the list as the runtime begins it, with its passes, in that from NORM."""
        before = self.num_updating
        return {each + before: other + before for each, other in places.items()}

    def _transfer(self, position: int, action: Action) -> None:
        after = self.track.before[self.track.openings.get(position, position)]
        if self.pairs and self._is_second(position):
            after = self.track.before[position - 1]
        stops = self.blocks or (self.blocks_activations and action.kind is Kind.SEND_ACTIVATION)
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
        owner = self.rank, position
        return self._on_main(self.graph.add(owner, Role.COPY, seconds_s, self.main))

    def _compute(self, position: int, action: Action) -> int:
        assert action.chunk is not None
        forward = action.kind is Kind.FORWARD
        self._gather_late(action.chunk)
        own = self._wait_for(position, (Kind.GATHER, Kind.FETCH), action.chunk)
        if action.kind is Kind.BACKWARD and (action.chunk, action.micro_batch) in self.copied_out:
            own = self.track.own[position] = (*own, self._copy_back(position, action))
        owner, phases_s = (self.rank, position), self._phases_s(action.chunk, action.kind)
        if self.is_perturbed:
            factor = self.factor * self.jitter.draw()
            phases_s = [factor * each for each in phases_s]
        if len(self.set) > 1:
            inside_s = self._inside_s(action)
            task = self.sets.join(self.set, action, owner, phases_s, inside_s, self.main, *own)
        else:
            task = self.graph.add(owner, Role.COMPUTE, sum(phases_s), self.main, *own)
        if action.kind in COMPUTE:
            consumer = self.rank, forward, action.chunk, action.micro_batch
            self.transfers.consumers[consumer] = task, position
        self._on_main(task)
        if forward and (action.chunk, action.micro_batch) in self.offloaded:
            self._copy_out(position, action)
        return task

    def _gather_late(self, chunk: int) -> None:
        """Start the gather that a framework has left to the chunk's first forward."""
        at = self.late_gathers.pop(chunk, None)
        if at is not None:
            self.track.tasks[at] = self._collective(at, self.track.actions[at])

    def _inside_s(self, action: Action) -> float:
        """What the set communicates in a computation; gathers for weight gradients overlap."""
        if action.kind is Kind.WEIGHT_GRADIENT:
            return 0.0
        assert action.chunk is not None
        gathers = not self.sizes.has_own_input(action)
        inside = self.costs.set_collectives(self.set, action.chunk, gathers=gathers)
        return float(inside.forward_s if action.kind is Kind.FORWARD else inside.backward_s)

    def _phases_s(self, chunk: int, kind: Kind) -> Sequence[float]:
        """See `ActionCosts.seconds`."""
        found = self.times_s.get((chunk, kind))
        if found is None:
            found = self.costs.seconds(self.rank, chunk, kind, splits=chunk in self.split)
            self.times_s[chunk, kind] = found
        return found

    def _collective(self, position: int, action: Action) -> int:
        own = live([self.collective])
        if action.kind is Kind.REDUCE:
            self._wait_for_reduction(position, action.chunk)
        else:
            fetched = live([self.pending.pop((Kind.FETCH, action.chunk), None)])
            if fetched:
                owner = self.rank, position
                self._on_main(self.graph.add(owner, Role.COPY, 0.0, self.main, *fetched))
                own += fetched
        self.track.own[position] = own
        task = self._join(position, action.kind, action.chunk, self.main, *own)
        self.collective = task
        assert action.chunk is not None
        if self.sizes.parted[action.chunk] is not None:
            self._on_main(task)
        if action.kind is Kind.REDUCE:
            self.reduction = task
        else:
            self.pending[action.kind, action.chunk] = self.copies[action.kind, action.chunk] = task
        return task

    def _wait_for_reduction(self, position: int, chunk: int | None) -> None:
        """Before a reduction that needs memory of its own, the one before must have ended."""
        assert chunk is not None
        frees = chunk in self.residency.released or self.sizes.reduces_in_low_precision(chunk)
        if frees and self.reduction != NOTHING:
            owner = self.rank, position
            self._on_main(self.graph.add(owner, Role.COPY, 0.0, self.main, self.reduction))

    def _copy(self, position: int, action: Action) -> int:
        out = action.kind is Kind.OFFLOAD
        first = (Kind.GATHER, Kind.FETCH) if out else (Kind.OFFLOAD,)
        move = self.residency.moves[position]
        stream = self.to_host if out else self.from_host
        if out and not move.copied_bytes:  # only the memory goes: it does not queue behind copies
            stream = NOTHING
        own = live([stream, *(self.copies.get((kind, action.chunk)) for kind in first)])
        self.track.own[position] = own
        seconds_s = self.costs.copy_s(self.rank, move.copied_bytes)
        task = self.graph.add((self.rank, position), Role.COPY, seconds_s, self.main, *own)
        if not out:
            self.from_host = task
        elif move.copied_bytes:
            self.to_host = task
        self.copies[action.kind, action.chunk] = task
        if not out:
            self.pending[action.kind, action.chunk] = task
        elif move.copied_bytes:
            self._on_main(task)
        return task

    def _offload_gradients(self, position: int, action: Action) -> int:
        assert action.chunk is not None
        owner, first = (self.rank, position), live([self.reduction, self.shard_out])
        self._on_main(self.graph.add(owner, Role.COPY, 0.0, self.main, *first))
        seconds_s = self.costs.copy_s(self.rank, self.residency.shard_of_gradients(action.chunk))
        self.to_host = self.graph.add(owner, Role.COPY, seconds_s, self.main, self.to_host)
        self.shard_out = self.to_host
        return self.shard_out

    def _read_for_norm(self, position: int, own: tuple[int, ...]) -> tuple[int, ...]:
        """Gradients that come from the host for their norm; what the STEP waits for then."""
        num_bytes, _ = self.residency.for_norm
        if not num_bytes:
            return own
        seconds_s = self.costs.copy_s(self.rank, num_bytes)
        task = self.graph.add((self.rank, position), Role.COPY, seconds_s, self.main, *own)
        self.track.copies[position] = self._on_main(task)
        return ()

    def _blocking(self, position: int, action: Action) -> int:
        owner = self.rank, position
        if action.kind is Kind.RELEASE:
            own = self._wait_for(position, (Kind.GATHER,), action.chunk)
            return self._on_main(self.graph.add(owner, Role.COMPUTE, 0.0, self.main, *own))
        leaving = self.shard_out if action.kind is Kind.SCALE else NOTHING
        own = self.track.own[position] = live([self.collective, self.from_host, leaving])
        if action.kind is Kind.TIE:
            return self._tie(position, own)
        if action.kind is Kind.NORM:
            own = self._read_for_norm(position, own)
        return self._on_main(self._join(position, action.kind, None, self.main, *own))

    def _step(self, position: int, action: Action) -> int:
        """The chunk's part of the update; what passes through the GPU is on its way before."""
        assert action.chunk is not None
        if not self.stepped_s:
            whole_s = self.costs.step_s(self.rank) * self.factor * self.jitter.draw()
            self.stepped_s = self.costs.stepped_s(self.rank, self.residency.stepped, whole_s)
        seconds_s = self.stepped_s[action.chunk]
        return self._on_main(
            self.graph.add((self.rank, position), Role.COMPUTE, seconds_s, self.main)
        )

    def _report(self) -> None:
        """Behind the update. Where only the loss is summed, the last group waits for its gathers,
        which run on the same communicator."""
        at, plan = len(self.track.actions), self.sizes.plan
        last = plan.chunks[-1].group
        if self.sizes.framework.sums_after_step:
            self._on_main(self._join(at, Kind.STEP, None, self.main))
        elif self.sizes.group_and_replica[self.rank][0] == last:
            gathered = live([self.collective])
            task = self._join(at, Kind.STEP, len(plan.chunks) - 1, self.main, *gathered)
            self.collective = self._on_main(task)
        self.main = self.collectives.tell_loss((self.rank, at), self.main)

    def _tie(self, position: int, own: tuple[int, ...]) -> int:
        owner = self.rank, position
        start = self._on_main(self.graph.add(owner, Role.COLLECTIVE, 0.0, self.main, *own))
        end = self._on_main(self.graph.add(owner, Role.COLLECTIVE, 0.0, start))
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

    def _offloaded(self, computations: Sequence[Action]) -> set[tuple[int | None, int | None]]:
        """(chunk, micro-batch) of the forwards whose activations wait in the host."""
        offload = self.sizes.settings[self.rank].offload
        backwards = {(a.chunk, a.micro_batch) for a in computations if a.kind is Kind.BACKWARD}
        if not offload.activations:
            return set()
        at_once = {
            (second.chunk, second.micro_batch)
            for first, second in pairwise(computations)
            if (first.chunk, first.micro_batch) == (second.chunk, second.micro_batch)
        }
        return backwards - at_once

    def _copy_out(self, position: int, action: Action) -> None:
        assert action.chunk is not None
        seconds_s = self.costs.copy_s(self.rank, self.sizes.kept_bytes(self.rank, action.chunk))
        owner = self.rank, position
        if self.last_out != NOTHING:
            self._on_main(self.graph.add(owner, Role.COPY, 0.0, self.main, self.last_out))
        self.to_host = self.last_out = self.graph.add(
            owner, Role.COPY, seconds_s, self.main, self.to_host
        )
        self.track.copies[position] = self.to_host
        self.copied_out[action.chunk, action.micro_batch] = self.to_host

    def _copy_back(self, position: int, action: Action) -> int:
        assert action.chunk is not None
        out = self.copied_out[action.chunk, action.micro_batch]
        issued_after = self.track.before[self.previous[position]]
        seconds_s = self.costs.copy_s(self.rank, self.sizes.kept_bytes(self.rank, action.chunk))
        self.from_host = self.graph.add(
            (self.rank, position), Role.COPY, seconds_s, issued_after, self.from_host, out
        )
        self.track.copies[position] = self.from_host
        return self.from_host

    def _wait_for(
        self, position: int, kinds: tuple[Kind, ...], chunk: int | None
    ) -> tuple[int, ...]:
        """The chunk's tasks of these kinds that the main stream has not waited for yet."""
        if not self.pending:
            return ()
        own = live([self.pending.pop((kind, chunk), None) for kind in kinds])
        if own:
            self.track.own[position] = own
        return own

    def _join(self, position: int, kind: Kind, chunk: int | None, *after: int) -> int:
        number = self.counts.get((kind, chunk), 0)
        self.counts[kind, chunk] = number + 1
        first = 0 if chunk is None else self.sizes.peers_of(self.rank, chunk)[0]
        task = self.collectives.join((kind, chunk, number, first), (self.rank, position), *after)
        self.track.communication.append(task)
        return task

    def _on_main(self, task: int) -> int:
        self.main = task
        self.track.main.append(task)
        return task
