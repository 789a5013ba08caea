"""What the simulator's tests share: a short way to simulate, and a second way to find times."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.strategies import sizes_as_they_run
from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from zorse_megatron.costs.interface import JobCosts
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.rank_bytes import RankSizes
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.trace import Span


def run(
    plan: Plan,
    *,
    compute: FakeCompute | None = None,
    memory: FakeMemory | None = None,
    comm: FakeComm | None = None,
    kinds: Sequence[str] | None = None,
    forward_only: bool = False,
    **options,
) -> SimulationResult:
    """Simulate with what is given, and with free communication on GPUs of one kind."""
    costs = costs_of(plan, compute=compute, memory=memory, comm=comm, kinds=kinds)
    more = {
        key: options.pop(key) for key in ("by_dtype", "recompute", "tp_costs") if key in options
    }
    if forward_only:
        options.setdefault("lists", lower_plan(plan, forward_only=True))
    return simulate(plan, replace(costs, **more), **options)


def traces_of(result: SimulationResult) -> dict[int, tuple[Span, ...]]:
    """Spans of every simulated rank."""
    return {rank: result.spans(rank) for rank in result.simulated_ranks}


def costs_of(plan: Plan, *, compute=None, memory=None, comm=None, kinds=None, **more) -> JobCosts:
    """Of what is given, with free communication on GPUs of one kind."""
    return JobCosts(
        compute=compute or FakeCompute(),
        memory=memory or FakeMemory(),
        comm=comm or FakeComm(),
        kinds=kinds or ["x"] * plan.world_size,
        sequence_length=1,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    source: int
    target: int
    action: str
    num_bytes: int
    start_s: float
    end_s: float


def transfers_of(result: SimulationResult) -> list[Transfer]:
    """All between chunks, by sender and in the order of its list."""
    times, sizes = result.timeline.times, result.timeline.sizes
    return [
        Transfer(
            source=rank,
            target=action.peer,
            action=str(action),
            num_bytes=sizes.crossing_bytes(action),
            start_s=times.start_s[task],
            end_s=times.end_s[task],
        )
        for rank, track in result.timeline.program.tracks.items()
        for action, task in zip(track.actions, track.tasks, strict=True)
        if action.kind in SENDS
    ]


@dataclass(kw_only=True)
class Reference:
    """Times of the lists without shared links, found by asking every rank in turn.

    From one NORM to the next: each list is taken from behind its own, and starts at 0.

    Each rank goes on as long as the times of what it waits for are known. Transfers on one edge
    follow each other; REDUCE_GRAD is taken as blocking, as today's lists have it at the end only.
    Written from the executor's rules, without the simulator's tasks or events.
    """

    plan: Plan
    lists: ActionLists
    compute: FakeCompute
    memory: FakeMemory
    comm: FakeComm
    kinds: Sequence[str]
    spans: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    """(rank, action) -> start and end of the work."""

    def __post_init__(self) -> None:
        self.sizes = RankSizes(self.plan, costs_of(self.plan, memory=self.memory))
        self.clock = [0.0] * self.plan.world_size
        self.at = [0] * self.plan.world_size
        self.posts = defaultdict(lambda: (deque(), deque()))
        self.edge_free_s = defaultdict(float)
        self.turns = [[0.0, 0.0] for _ in self.clock]
        """Rank -> when its computations' turns came."""
        self.under_way = [deque() for _ in self.clock]
        """Rank -> its sends that it has not waited for: computations before, when it has left."""
        self.end_s = 0.0
        self.expected = defaultdict(int)
        self.arrived = defaultdict(list)
        self.todo: list[list[Action | None]] = [_from_norm(each) for each in self.lists.ranks]
        """None: the report behind the update."""
        self.came_to_gather: dict[int, float] = {}
        self.came_to_report: dict[int, float] = {}
        for rank, actions in enumerate(self.lists.ranks):
            for action in actions:
                if action.kind in RECEIVES:
                    self.expected[self._consumer(rank, action)] += 1
        while any([self._advance(rank) for rank in range(self.plan.world_size)]):
            pass
        assert all(self.at[r] == len(a) for r, a in enumerate(self.todo)), "stuck"

    def _gathered_s(self, rank: int) -> float | None:
        """When the gather of the rank's group is done; None: not all have come to it."""
        group = self.plan.groups[self.plan.group_of_rank(rank)].ranks
        if any(member not in self.came_to_gather for member in group):
            return None
        start_s = max(self.came_to_gather[member] for member in group)
        parts = [self.sizes.shards[self._chunk(rank)][member] for member in group]
        num_bytes = tuple(map(self.memory.parameter_bytes, parts))
        took_s = self.comm.all_gather_s(tuple(group), num_bytes) if len(group) > 1 else 0.0
        for member in group:
            self.spans[member, f"{self._chunk(rank)}UNSHARD"] = start_s, start_s + took_s
        self.end_s = max(self.end_s, start_s + took_s)
        return start_s + took_s

    def _chunk(self, rank: int) -> int:
        return self.plan.chunks_of_group(self.plan.group_of_rank(rank))[0]

    def _begin(self, rank: int) -> bool:
        """The runtime begins its list, behind the report."""
        if not self._report(rank):
            return False
        self.turns[rank] = [self.clock[rank]] * 2
        return True

    def _report(self, rank: int) -> bool:
        """The loss is summed over the last group behind its gather, and the job's last rank told.

        Nobody else waits.
        """
        group = self.plan.groups[self.plan.chunks[-1].group].ranks
        last = self.plan.world_size - 1
        self.came_to_report.setdefault(rank, self.clock[rank])
        if rank not in group and rank != last:
            return True
        gathered_s = self._gathered_s(group[0])
        if gathered_s is None or any(member not in self.came_to_report for member in group):
            return False
        known_s = max(gathered_s, *(self.came_to_report[member] for member in group))
        known_s += self.comm.all_reduce_s(tuple(group), 4) if len(group) > 1 else 0.0
        if rank not in group:
            known_s = max(known_s, self.clock[rank]) + self.comm.transfer_s(group[0], last, 4)
        self.clock[rank] = known_s
        self.end_s = max(self.end_s, known_s)
        return True

    @staticmethod
    def _consumer(rank: int, action: Action) -> tuple:
        forward = action.kind in (Kind.FORWARD, Kind.RECV_F)
        return rank, forward, action.chunk, action.micro_batch

    def _advance(self, rank: int) -> bool:
        moved = False
        while self.at[rank] < len(self.todo[rank]):
            action = self.todo[rank][self.at[rank]]
            if not (self._begin(rank) if action is None else self._do(rank, action)):
                break
            self.at[rank] += 1
            moved = True
        return moved

    def _do(self, rank: int, action: Action) -> bool:
        if action.kind in SENDS | RECEIVES:
            self._post(rank, action)
            return True
        if action.kind is Kind.UNSHARD:
            self.came_to_gather[rank] = self.clock[rank]
            return True
        if action.kind in (Kind.STEP, Kind.WEIGHT_GRADIENT):
            start_s = self.clock[rank]
            self._span(rank, action, start_s, start_s + self._duration_s(rank, action))
            return True
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            key = self._consumer(rank, action)
            left_s = self._left_s(rank, len(self.turns[rank]) - 2 - 6)
            gathered_s = self._gathered_s(rank) if None in self.todo[rank] else 0.0
            missing = len(self.arrived[key]) < self.expected[key]
            if left_s is None or gathered_s is None or missing:
                return False
            self.turns[rank].append(self.clock[rank])
            start_s = max([self.clock[rank], left_s, gathered_s, *self.arrived[key]])
            self._span(rank, action, start_s, start_s + self._duration_s(rank, action))
            return True
        return self._join(rank, action)

    def _left_s(self, rank: int, most: int) -> float | None:
        """When all that was sent after so many computations, or fewer, has left."""
        sent = [left_s for before, left_s in self.under_way[rank] if before <= most]
        return None if None in sent else max(sent, default=0.0)

    def _span(self, rank: int, action: Action, start_s: float, end_s: float) -> None:
        self.spans[rank, str(action)] = start_s, end_s
        self.clock[rank] = end_s
        self.end_s = max(self.end_s, end_s)

    def _duration_s(self, rank: int, action: Action) -> float:
        if action.kind is Kind.STEP:
            return self.compute.step_s(self.kinds[rank], self.sizes.shards[action.chunk][rank])
        chunk = self.plan.chunks[action.chunk]
        group, replica = self.plan.replica_of_rank(rank)
        own = sizes_as_they_run(self.plan.groups[group].replicas[replica])
        size = own[action.micro_batch]
        layers = chunk.layers[1] - chunk.layers[0]
        weights_s = layers * self.compute.weight_gradients_s(self.kinds[rank], size)
        if action.kind is Kind.WEIGHT_GRADIENT:
            return weights_s
        parts = [self.compute.layer(self.kinds[rank], size)] * layers
        if action.chunk == 0:
            parts.append(self.compute.embedding(self.kinds[rank], size))
        if action.chunk == len(self.plan.chunks) - 1:
            parts.append(self.compute.head(self.kinds[rank], size))
        forward = action.kind is Kind.FORWARD
        whole_s = sum(part.forward_s if forward else part.backward_s for part in parts)
        splits = self.plan.groups[chunk.group].split_backward and not forward
        return whole_s - weights_s if splits else whole_s

    def _post(self, rank: int, action: Action) -> None:
        sends = action.kind in SENDS
        edge = (rank, action.peer) if sends else (action.peer, rank)
        # A receive may begin at the turn of the second computation before it.
        posted_s = self.clock[rank] if sends else self.turns[rank][-2]
        entry = [len(self.turns[rank]) - 2, None]
        if sends:
            self.under_way[rank].append(entry)
        self.posts[edge][0 if sends else 1].append((posted_s, rank, action, entry))
        sent, received = self.posts[edge]
        while sent and received:
            send_s, _, send, entry = sent.popleft()
            receive_s, target, receive, _ = received.popleft()
            assert send.samples == receive.samples
            num_bytes = self.memory.boundary_bytes(send.samples[1] - send.samples[0])
            start_s = max(send_s, receive_s, self.edge_free_s[edge])
            end_s = start_s + self.comm.transfer_s(edge[0], edge[1], num_bytes)
            self.edge_free_s[edge] = entry[1] = end_s
            self.end_s = max(self.end_s, end_s)
            self.arrived[self._consumer(target, receive)].append(end_s)

    def _join(self, rank: int, action: Action) -> bool:
        """A collective: known once all members stand at it, and then for all of them."""
        group = self.plan.groups[self.plan.group_of_rank(rank)].ranks
        members = group if action.chunk is not None else range(self.plan.world_size)
        known = self.spans.get((rank, str(action)))
        if known is not None:
            self.clock[rank] = known[1]
            return True
        for member in members:
            at, actions = self.at[member], self.todo[member]
            standing = actions[at] if at < len(actions) else None
            if standing is None or standing.kind != action.kind:
                return False
        start_s = max(self.clock[member] for member in members)
        if action.kind is Kind.NORM:
            left = [self._left_s(member, len(self.turns[member])) for member in members]
            if None in left:
                return False
            start_s = max(start_s, *left)
        end_s = start_s + self._collective_s(action, tuple(group), len(members))
        for member in members:
            self.spans[member, str(action)] = start_s, end_s
        self.end_s = max(self.end_s, end_s)
        self.clock[rank] = end_s
        return True

    def _collective_s(self, action: Action, group: tuple[int, ...], count: int) -> float:
        if count == 1 or action.kind is Kind.NORM:
            return 0.0
        if action.chunk is None:
            return self.comm.all_reduce_s(tuple(range(count)), 4)
        shards = tuple(self.sizes.shards[action.chunk].values())
        return self.comm.reduce_scatter_s(group, tuple(map(self.memory.gradient_bytes, shards)))


def _from_norm(actions: Sequence[Action]) -> list[Action | None]:
    words = [str(action) for action in actions]
    if "NORM" not in words:
        return list(actions)
    cut = words.index("NORM") + 1
    return [*actions[cut:], None, *actions[:cut]]
