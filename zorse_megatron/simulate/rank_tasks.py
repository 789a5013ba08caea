"""The tasks of one rank's list; the rules are those of `translate`."""

from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import COMPUTE, ON_LAYERS, RECEIVES, TRANSFERS, Action, Kind
from zorse_megatron.schedules.receive_openings import receive_openings
from zorse_megatron.schedules.send_closings import send_closings
from zorse_megatron.simulate.collective_tasks import CollectiveTasks
from zorse_megatron.simulate.host_copy_tasks import HostCopyTasks
from zorse_megatron.simulate.perturb import Perturbation
from zorse_megatron.simulate.residency import Residency
from zorse_megatron.simulate.set_tasks import SetTasks
from zorse_megatron.simulate.stage_tasks import StageTasks
from zorse_megatron.simulate.streams import Streams
from zorse_megatron.simulate.task_graph import NOTHING, Role, Track, live
from zorse_megatron.simulate.transfers import MatchedTransfers

_PAIRS = (
    {Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT},
    {Kind.SEND_GRADIENT, Kind.RECEIVE_ACTIVATION},
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
        self.streams = Streams(rank=rank, graph=self.graph, track=self.track)
        self.stages = StageTasks(collectives, self.streams)
        self.reduction = NOTHING
        """The last one."""
        self.split = {a.chunk for a in actions if a.kind is Kind.WEIGHT_GRADIENT}
        """Chunks whose weight gradients are computed apart."""
        self.stepped_s: Mapping[int, float] = {}
        """Chunk -> how long its part of the update stops the main stream."""
        self.late_gathers: dict[int | None, int] = {}
        """Chunk -> position of a gather that its first forward starts."""
        self.counts: dict[tuple[Kind, int | None], int] = {}
        self.pending: dict[tuple[Kind, int | None], int] = {}
        """GATHERs and FETCHes of parameters that the main stream has not waited for yet."""
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
            elif kind in (Kind.REDUCE, Kind.GATHER):
                if position < self.num_updating and not self.sizes.framework.gathers_ahead:
                    self.late_gathers[action.chunk] = position
                    continue
                task = self._collective(position, action)
            elif kind is Kind.STEP:
                task = self._step(position, action)
            elif kind in (Kind.OFFLOAD, Kind.FETCH):
                task = self.copies.move(position, action)
            elif kind is Kind.OFFLOAD_GRADIENTS:
                task = self.copies.send_gradients(position, action, after=self.reduction)
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
        return self.streams.run(position, Role.COPY, seconds_s)

    def _compute(self, position: int, action: Action) -> int:
        assert action.chunk is not None
        forward = action.kind is Kind.FORWARD
        self._gather_late(action.chunk)
        own = self._wait_for(position, (Kind.GATHER, Kind.FETCH), action.chunk)
        if action.kind is Kind.BACKWARD and (action.chunk, action.micro_batch) in self.copies.away:
            own = self.track.own[position] = (*own, self.copies.bring_back(position, action))
        owner, phases_s = (self.rank, position), self._phases_s(action.chunk, action.kind)
        main = self.streams.main
        if self.is_perturbed:
            factor = self.factor * self.jitter.draw()
            phases_s = [factor * each for each in phases_s]
        if len(self.set) > 1:
            inside_s = self._inside_s(action)
            task = self.sets.join(self.set, action, owner, phases_s, inside_s, main, *own)
        else:
            task = self.graph.add(owner, Role.COMPUTE, sum(phases_s), main, *own)
        if action.kind in COMPUTE:
            consumer = self.rank, forward, action.chunk, action.micro_batch
            self.transfers.consumers[consumer] = task, position
        self.streams.on_main(task)
        if forward:
            self.copies.send_activations(position, action)
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
        staged = self.stages.are_made(action)
        own = self.stages.before if staged else live([self.streams.collective])
        fetched: tuple[int, ...] = ()
        if action.kind is Kind.REDUCE:
            self._wait_for_reduction(position, action.chunk)
        else:
            fetched = live([self.pending.pop((Kind.FETCH, action.chunk), None)])
            if fetched:
                self.streams.run(position, Role.COPY, 0.0, *fetched)
        own = self.track.own[position] = own + fetched
        if staged:
            task = self.stages.join(position, action, *fetched)
        else:
            task = self._join(position, action.kind, action.chunk, self.streams.main, *own)
        self.streams.collective = task
        assert action.chunk is not None
        if self.sizes.parted[action.chunk] is not None:
            self.streams.on_main(task)
        if action.kind is Kind.REDUCE:
            self.reduction = task
        else:
            self.pending[action.kind, action.chunk] = task
            self.copies.last[action.kind, action.chunk] = task
        return task

    def _wait_for_reduction(self, position: int, chunk: int | None) -> None:
        """Before a reduction that needs memory of its own, the one before must have ended."""
        assert chunk is not None
        frees = chunk in self.residency.released or self.sizes.reduces_beside(chunk)
        if frees and self.reduction != NOTHING:
            self.streams.run(position, Role.COPY, 0.0, self.reduction)

    def _blocking(self, position: int, action: Action) -> int:
        streams = self.streams
        if action.kind is Kind.RELEASE:
            own = self._wait_for(position, (Kind.GATHER,), action.chunk)
            return streams.run(position, Role.COMPUTE, 0.0, *own)
        leaving = self.copies.shard_out if action.kind is Kind.SCALE else NOTHING
        own = self.track.own[position] = live([streams.collective, streams.from_host, leaving])
        if action.kind is Kind.TIE:
            return self._tie(position, own)
        if action.kind is Kind.NORM:
            own = self.copies.read_for_norm(position, own)
        return streams.on_main(self._join(position, action.kind, None, streams.main, *own))

    def _step(self, position: int, action: Action) -> int:
        """The chunk's part of the update; what passes through the GPU is on its way before."""
        assert action.chunk is not None
        if not self.stepped_s:
            whole_s = self.costs.step_s(self.rank) * self.factor * self.jitter.draw()
            self.stepped_s = self.costs.stepped_s(self.rank, self.residency.stepped, whole_s)
        seconds_s = self.stepped_s[action.chunk]
        return self.streams.run(position, Role.COMPUTE, seconds_s)

    def _report(self) -> None:
        """Behind the update. Where only the loss is summed, the last group waits for its gathers,
        which run on the same communicator."""
        at, plan = len(self.track.actions), self.sizes.plan
        last = plan.chunks[-1].group
        if self.sizes.framework.sums_after_step:
            self.streams.on_main(self._join(at, Kind.STEP, None, self.streams.main))
        elif self.sizes.group_and_replica[self.rank][0] == last:
            gathered = live([self.streams.collective])
            task = self._join(at, Kind.STEP, len(plan.chunks) - 1, self.streams.main, *gathered)
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
