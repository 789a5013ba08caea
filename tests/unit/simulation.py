"""What the simulator's tests share: a short way to simulate, and a second way to find times."""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from zorse_megatron.schedules.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.rank_sizes import RankSizes
from zorse_megatron.simulate.result import SimulationResult


def run(
    plan: Plan,
    *,
    compute: FakeCompute | None = None,
    memory: FakeMemory | None = None,
    comm: FakeComm | None = None,
    kinds: Sequence[str] | None = None,
    **options,
) -> SimulationResult:
    """Simulate with what is given, and with free communication on GPUs of one kind."""
    return simulate(
        plan,
        compute or FakeCompute(),
        memory or FakeMemory(),
        comm or FakeComm(),
        kinds or ["x"] * plan.world_size,
        sequence_length=1,
        **options,
    )


@dataclass(kw_only=True)
class Reference:
    """Times of the lists without shared links, found by asking every rank in turn.

    Each rank goes on as long as the times of what it waits for are known. Transfers on one edge
    follow each other; REDUCE and GATHER are taken as blocking, as today's lists have them at the
    end only. Written from the executor's rules, without the simulator's tasks or events.
    """

    plan: Plan
    lists: ActionLists
    compute: FakeCompute
    memory: FakeMemory
    comm: FakeComm
    kinds: Sequence[str]
    spans: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(rank, position) -> start and end of the work."""

    def __post_init__(self) -> None:
        self.sizes = RankSizes(self.plan, self.memory)
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
        for rank, actions in enumerate(self.lists.ranks):
            for action in actions:
                if action.kind in RECEIVES:
                    self.expected[self._consumer(rank, action)] += 1
        while any([self._advance(rank) for rank in range(self.plan.world_size)]):
            pass
        assert all(self.at[r] == len(a) for r, a in enumerate(self.lists.ranks)), "stuck"
        if any(action.kind is Kind.STEP for action in self.lists.ranks[0]):
            self.end_s = max(self.end_s, max(self.clock) + self._report_s())

    def _report_s(self) -> float:
        """The loss is summed over the last group and told to the job's last rank."""
        group = self.plan.groups[self.plan.chunks[-1].group].ranks
        sum_s = self.comm.all_reduce_s(tuple(group), 4) if len(group) > 1 else 0.0
        last = self.plan.world_size - 1
        return sum_s + (0.0 if last in group else self.comm.transfer_s(group[0], last, 4))

    @staticmethod
    def _consumer(rank: int, action: Action) -> tuple:
        forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
        return rank, forward, action.chunk, action.micro_batch

    def _advance(self, rank: int) -> bool:
        moved = False
        while self.at[rank] < len(self.lists.ranks[rank]):
            action = self.lists.ranks[rank][self.at[rank]]
            if not self._do(rank, action):
                break
            self.at[rank] += 1
            moved = True
        return moved

    def _do(self, rank: int, action: Action) -> bool:
        if action.kind in SENDS | RECEIVES:
            self._post(rank, action)
            return True
        if action.kind is Kind.WEIGHT_GRADIENT:
            self._span(rank, self.clock[rank], self.clock[rank] + self._duration_s(rank, action))
            return True
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            key = self._consumer(rank, action)
            left_s = self._left_s(rank, len(self.turns[rank]) - 2 - 6)
            if left_s is None or len(self.arrived[key]) < self.expected[key]:
                return False
            self.turns[rank].append(self.clock[rank])
            start_s = max([self.clock[rank], left_s, *self.arrived[key]])
            self._span(rank, start_s, start_s + self._duration_s(rank, action))
            return True
        return self._join(rank, action)

    def _left_s(self, rank: int, most: int) -> float | None:
        """When all that was sent after so many computations, or fewer, has left."""
        sent = [left_s for before, left_s in self.under_way[rank] if before <= most]
        return None if None in sent else max(sent, default=0.0)

    def _span(self, rank: int, start_s: float, end_s: float) -> None:
        self.spans[rank, self.at[rank]] = start_s, end_s
        self.clock[rank] = end_s
        self.end_s = max(self.end_s, end_s)

    def _duration_s(self, rank: int, action: Action) -> float:
        chunk = self.plan.chunks[action.chunk]
        size = self.sizes.micro_batch_size(rank)
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
            end_s = start_s + self.comm.transfer_s(*edge, num_bytes)
            self.edge_free_s[edge] = entry[1] = end_s
            self.end_s = max(self.end_s, end_s)
            self.arrived[self._consumer(target, receive)].append(end_s)

    def _join(self, rank: int, action: Action) -> bool:
        """A collective: known once all members stand at it, and then for all of them."""
        group = self.plan.groups[self.plan.group_of_rank(rank)].ranks
        members = group if action.chunk is not None else range(self.plan.world_size)
        known = self.spans.get((rank, self.at[rank]))
        if known is not None:
            self.clock[rank] = known[1]
            return True
        for member in members:
            at, actions = self.at[member], self.lists.ranks[member]
            if at == len(actions) or actions[at].kind != action.kind:
                return False
        start_s = max(self.clock[member] for member in members)
        if action.kind is Kind.STEP:
            left = [self._left_s(member, len(self.turns[member])) for member in members]
            if None in left:
                return False
            start_s = max(start_s, *left)
        for member in members:
            owned = self.sizes.shards[self.plan.chunks_of_group(self.plan.group_of_rank(member))[0]]
            own_s = self.compute.step_s(self.kinds[member], owned[member])
            end_s = start_s + self._collective_s(action, tuple(group), len(members))
            if action.kind is Kind.STEP:
                end_s += own_s
            self.spans[member, self.at[member]] = start_s, end_s
            self.end_s = max(self.end_s, end_s)
        self.clock[rank] = self.spans[rank, self.at[rank]][1]
        return True

    def _collective_s(self, action: Action, group: tuple[int, ...], count: int) -> float:
        if count == 1:
            return 0.0
        if action.chunk is None:
            times = 2 if action.kind is Kind.SCALE else 1
            return times * self.comm.all_reduce_s(tuple(range(count)), 4)
        shards = tuple(self.sizes.shards[action.chunk].values())
        if action.kind is Kind.REDUCE:
            parts = tuple(map(self.memory.gradient_bytes, shards))
            return self.comm.reduce_scatter_s(group, parts)
        parts = tuple(map(self.memory.parameter_bytes, shards))
        return self.comm.all_gather_s(group, parts)
