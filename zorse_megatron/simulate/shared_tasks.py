"""Tasks of several ranks or streams: collectives, tensor-parallel groups, host copies."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from zorse_megatron.schedule.actions import COMPUTE, Action, Kind
from zorse_megatron.schedule.transfer_windows import Pass, leaving_activations
from zorse_megatron.simulate.action_costs import ActionCosts, GatherPart
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.network import TaskWork
from zorse_megatron.simulate.residency import Residency
from zorse_megatron.simulate.tasks import NOTHING, Role, Streams, TaskGraph, live

CollectiveKey = tuple[Kind, int | None, int, int]
"""Kind, chunk (None: the whole world), how many of these came before in the list, and the first of
the ranks that take part.

STEP stands for what is told behind the update: of the world, or of the last group (its chunk).
"""


class CollectiveTasks:
    """Makes the task when the first rank joins; the others wait for it too."""

    def __init__(
        self,
        graph: TaskGraph,
        costs: ActionCosts,
        lists: Mapping[int, Sequence[Action]],
        stands_in: Sequence[int],
    ) -> None:
        """`stands_in`: rank -> that of the lists' ranks which stands for it."""
        self.graph = graph
        self.costs = costs
        self.ranks = lists.keys()
        self.tasks: dict[CollectiveKey, tuple[int, ...]] = {}
        self.joined: Counter[CollectiveKey] = Counter()
        self.stages: dict[tuple[CollectiveKey, str], int] = {}
        self.stands_in = tuple(stands_in)
        self.loss_message = NOTHING

    def join(
        self, key: CollectiveKey, owner: tuple[int, int], parts: Sequence[GatherPart], *after: int
    ) -> tuple[int, ...]:
        """Let a rank take part in a collective; returns a task for each part, one after another."""
        if key not in self.tasks:
            tasks = [NOTHING]
            for work in self._works(key, parts):
                tasks.append(self.graph.add_work(owner, Role.COLLECTIVE, work, tasks[-1]))
            self.tasks[key] = tuple(tasks[1:])
        for earlier in after:
            self.graph.order(earlier, self.tasks[key][0])
        self.joined[key] += 1
        return self.tasks[key]

    def join_stage(
        self, key: CollectiveKey, stage: str, owner: tuple[int, int], work: TaskWork, *after: int
    ) -> int:
        """Let a rank take part in a stage of a collective, which may be one of its region.

        Whoever has joined all stages that are its own counts in `joined`.
        """
        if (key, stage) not in self.stages:
            self.stages[key, stage] = self.graph.add_work(owner, Role.COLLECTIVE, work)
        for earlier in after:
            self.graph.order(earlier, self.stages[key, stage])
        return self.stages[key, stage]

    def tell_loss(self, owner: tuple[int, int], after: int) -> int:
        """Send the loss to the job's last rank, or wait for it; returns what a rank waits for."""
        plan, (rank, _) = self.costs.sizes.plan, owner
        ranks, last = plan.groups[plan.chunks[-1].group].ranks, plan.world_size - 1
        source, target = self.stands_in[ranks[0]], self.stands_in[last]
        if self.costs.sizes.framework.sums_after_step or last in ranks:
            return after
        if rank not in (source, target):
            return after
        if self.loss_message == NOTHING:
            seconds_s = self.costs.loss_message_s(ranks[0], last)
            self.loss_message = self.graph.add(owner, Role.COLLECTIVE, seconds_s)
        self.graph.order(after, self.loss_message)
        return self.loss_message if rank == target else after

    def _works(self, key: CollectiveKey, parts: Sequence[GatherPart]) -> Iterable[TaskWork]:
        (kind, chunk, _, first), costs = key, self.costs
        if chunk is None:
            alone = {Kind.SCALE: costs.at_scale, Kind.NORM: costs.at_norm, Kind.STEP: costs.report}
            return [alone[kind]()]
        peers = costs.sizes.peers_of(first, chunk)
        if kind is Kind.STEP:
            return [costs.loss(peers)]
        if len(parts) > 1:
            return costs.gather_in_parts(chunk, peers, parts)
        return [costs.collective(kind, chunk, peers)]

    def check(self) -> None:
        """Raise SimulationError where a rank that others wait for does not take part."""
        for (kind, chunk, _, first), joined in self.joined.items():
            members = set(self.ranks)
            if chunk is not None:
                members &= set(self.costs.sizes.peers_of(first, chunk))
            if joined != len(members):
                word = kind if chunk is None else f"{chunk}{kind}"
                raise SimulationError(
                    f"found {word} in the lists of {joined} ranks; expected it on all "
                    f"{len(members)}, as they would wait for each other"
                )


# Reductions and gathers of hierarchical groups: stages on two streams.
#
# What the stages are is said in `network`. One operation's messages between regions are on
# their way while the regions work on the next one.


class StageTasks:
    """Those of one rank."""

    def __init__(self, collectives: CollectiveTasks, streams: Streams) -> None:
        self.collectives = collectives
        self.sizes = collectives.costs.sizes
        self.streams = streams
        self.counts: Counter[tuple[Kind, int]] = Counter()

    def are_made(self, action: Action) -> bool:
        """Whether the action is one of several stages."""
        assert action.chunk is not None
        rank = self.streams.rank
        return (
            self.sizes.is_hierarchical(action.chunk)
            and len(self.sizes.peers_of(rank, action.chunk)) > 1
        )

    @property
    def before(self) -> tuple[int, ...]:
        """The last ones."""
        return live([self.streams.inside, self.streams.between])

    def join(
        self, position: int, action: Action, parts: Sequence[GatherPart], *after: int
    ) -> tuple[int, ...]:
        """Take part in all stages, which begin when the main stream gets there.

        Each region has stages of its own, messages are one stage of all. Returns for each part
        what ends it on this rank, which does not wait for the stages of other regions.
        """
        kind, chunk, streams = action.kind, action.chunk, self.streams
        assert chunk is not None
        peers = self.sizes.peers_of(streams.rank, chunk)
        key = kind, chunk, self.counts[kind, chunk], peers[0]
        self.counts[kind, chunk] += 1
        owner, track = (streams.rank, position), streams.track
        costs, ready = self.collectives.costs, (streams.main, *after)
        buffers, regions = costs.buffers(kind, chunk, peers)
        at = sorted(peers).index(streams.rank)
        region = next(n for n, (first, stop) in enumerate(regions) if first <= at < stop)

        def stage(name: str, work: TaskWork, *earlier: int) -> int:
            task = self.collectives.join_stage(key, name, owner, work, *live(earlier))
            track.communication.append(task)
            track.starts.setdefault(position, task)
            return task

        if kind is Kind.REDUCE_GRAD:
            ready = (stage(f"sums of {region}", costs.sums_in_tp_groups(chunk), *ready),)
        last_buffers = list(accumulate(part.buckets for part in parts[:-1]))
        ends: list[int] = []
        for number, buffer in enumerate(buffers):
            if number in last_buffers:
                ends.append(self._end_here(owner))
            foreign = f"{number} in {region} of others", buffer.foreign[region]
            own = f"{number} in {region}", buffer.own[region]
            between = f"{number}", buffer.between
            if kind is Kind.REDUCE_GRAD:
                streams.inside = stage(*foreign, streams.inside, *ready)
                streams.between = stage(*between, streams.between, streams.inside)
                streams.inside = stage(*own, streams.inside)
            else:
                streams.between = stage(*between, streams.between, *ready)
                streams.inside = stage(*own, streams.inside, *ready)
                streams.inside = stage(*foreign, streams.inside, streams.between)
        self.collectives.joined[key] += 1
        return (*ends, self._end_here(owner))

    def _end_here(self, owner: tuple[int, int]) -> int:
        streams = self.streams
        last = live([streams.inside, streams.between])
        return streams.graph.add(owner, Role.COLLECTIVE, 0.0, *last)


# Computations of tensor-parallel groups: one task for all ranks of a TP group.
#
# The TP group's collectives are inside, so it starts when all of its ranks are ready. They end the
# attention and the MLP of each layer, and embedding and head: each of these takes as long as on the
# rank that is slowest there, which with uneven TP shards need not be one rank.


class TpTasks:
    """Makes the task when the first rank of a TP group joins; the others wait for it too."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self._tasks: dict[tuple[tuple[int, ...], Action, int], int] = {}
        self._joined: Counter[tuple[tuple[int, ...], Action, int]] = Counter()
        self._slowest_s: dict[int, list[float]] = {}
        """By task: of each phase."""

    def join(
        self,
        ranks: tuple[int, ...],
        action: Action,
        owner: tuple[int, int],
        phases_s: Sequence[float],
        inside_s: float,
        *after: int,
        part: int = 0,
    ) -> int:
        """Let a rank of a TP group take part in a computation, or in one of its parts.

        `phases_s`: what it computes between collectives; `inside_s`: what these take.
        """
        key = ranks, action, part
        if key not in self._tasks:
            self._tasks[key] = self.graph.add(owner, Role.COMPUTE, 0.0)
        task = self._tasks[key]
        for earlier in after:
            self.graph.order(earlier, task)
        slowest_s = self._slowest_s.setdefault(task, [0.0] * len(phases_s))
        slowest_s[:] = map(max, slowest_s, phases_s)
        self.graph.seconds_s[task] = sum(slowest_s) + inside_s
        self._joined[key] += 1
        return task

    def check(self) -> None:
        """Raise SimulationError where a rank that others wait for does not take part."""
        for (ranks, action, _), joined in self._joined.items():
            if joined != len(ranks):
                raise SimulationError(
                    f"found {action} in the lists of {joined} ranks; expected it on all of "
                    f"{list(ranks)}, as they compute together"
                )


# The copies between a rank and its host; the rules are those of `translate`.


class HostCopyTasks:
    """Copies of parameters, of gradients and of activations, on two streams."""

    def __init__(
        self,
        streams: Streams,
        costs: ActionCosts,
        residency: Residency,
        pending: dict[int | None, int],
    ) -> None:
        """`pending`: chunk -> a FETCH that the main stream has not waited for; they are added."""
        self.streams = streams
        self.graph = streams.graph
        self.track = streams.track
        self.rank = streams.rank
        self.costs = costs
        self.sizes = costs.sizes
        self.residency = residency
        self.pending = pending
        self.last: dict[tuple[Kind, int | None], int] = {}
        """The last UNSHARD, OFFLOAD and FETCH of each chunk, for the copies after it."""
        self.last_out = self.shard_out = NOTHING
        """The last copies of activations and of a shard of gradients to the host."""
        self.last_sent = 0
        """Position of the forward whose activations left last."""
        self.away: dict[Pass, int] = {}
        """Forward -> the copy of its activations to the host."""
        computations = [(at, a) for at, a in enumerate(self.track.actions) if a.kind in COMPUTE]
        self.following = {earlier[0]: later for earlier, later in pairwise(computations)}
        """Position of a computation -> that of the next one, and it."""
        self.coming: dict[Pass, int] = {}
        """Backward -> the copy of its activations from the host."""
        offloads = self.sizes.settings[self.rank].offload.activations
        passes = [action for _, action in computations]
        self.offloaded = leaving_activations(passes) if offloads else frozenset()
        """The forwards whose activations wait in the host."""

    def move(self, position: int, action: Action) -> int:
        """OFFLOAD or FETCH: parameters leave or come back."""
        out = action.kind is Kind.OFFLOAD
        first = (Kind.UNSHARD, Kind.FETCH) if out else (Kind.OFFLOAD,)
        move = self.residency.moves[position]
        streams = self.streams
        stream = streams.to_host if out else streams.from_host
        if out and not move.copied_bytes:  # only the memory goes: it does not queue behind copies
            stream = NOTHING
        own = live([stream, *(self.last.get((kind, action.chunk)) for kind in first)])
        self.track.own[position] = own
        seconds_s = self.costs.copy_s(self.rank, move.copied_bytes)
        task = self.graph.add((self.rank, position), Role.COPY, seconds_s, streams.main, *own)
        self.last[action.kind, action.chunk] = task
        if not out:
            streams.from_host = self.pending[action.chunk] = task
        elif move.copied_bytes:
            streams.to_host = streams.on_main(task)
        return task

    def send_gradients(self, position: int, action: Action, *, after: int) -> int:
        """OFFLOAD_GRAD: a shard of gradients leaves when it is reduced. `after`: the last
        REDUCE_GRAD."""
        assert action.chunk is not None
        streams = self.streams
        streams.run(position, Role.COPY, 0.0, *live([after, self.shard_out]))
        seconds_s = self.costs.copy_s(self.rank, self.residency.shard_of_gradients(action.chunk))
        owner = self.rank, position
        streams.to_host = self.graph.add(owner, Role.COPY, seconds_s, streams.main, streams.to_host)
        self.shard_out = streams.to_host
        return self.shard_out

    def read_for_norm(self, position: int, own: tuple[int, ...]) -> tuple[int, ...]:
        """Gradients that come from the host for their norm; what SCALE waits for then."""
        num_bytes, _ = self.residency.for_norm
        if not num_bytes:
            return own
        seconds_s = self.costs.copy_s(self.rank, num_bytes)
        self.track.copies[position] = self.streams.run(position, Role.COPY, seconds_s, *own)
        return ()

    def send_activations(self, position: int, action: Action) -> None:
        """What a forward keeps may leave, when what the one before it kept has left."""
        assert action.chunk is not None
        streams = self.streams
        if self.last_out != NOTHING:
            left = streams.run(position, Role.COPY, 0.0, self.last_out)
            self.track.left[self.last_sent], self.last_out = left, NOTHING
        if (action.chunk, action.micro_batch) not in self.offloaded:
            return
        self.last_sent = position
        seconds_s = self.costs.copy_s(self.rank, self._saved_bytes(action))
        owner = self.rank, position
        streams.to_host = self.last_out = self.graph.add(
            owner, Role.COPY, seconds_s, streams.main, streams.to_host
        )
        self.track.copies[position] = streams.to_host
        self.away[action.chunk, action.micro_batch] = streams.to_host

    def _saved_bytes(self, action: Action) -> int:
        """What the micro-batch's forward keeps."""
        assert action.chunk is not None and action.micro_batch is not None
        return self.sizes.micro_batch_bytes(self.rank, action.chunk, action.micro_batch).saved

    def bring_back(self, position: int) -> None:
        """As a computation begins: what the next one needs comes back, if that is a backward."""
        at, action = self.following.get(position, (position, None))
        if action is None or action.kind is not Kind.BACKWARD:
            return
        key = action.chunk, action.micro_batch
        if key not in self.away:
            return
        assert action.chunk is not None
        streams, out = self.streams, self.away[key]
        seconds_s = self.costs.copy_s(self.rank, self._saved_bytes(action))
        streams.from_host = self.coming[key] = self.graph.add(
            (self.rank, at), Role.COPY, seconds_s, streams.main, streams.from_host, out
        )
        self.track.copies[at] = streams.from_host
        self.track.brings[position] = at
