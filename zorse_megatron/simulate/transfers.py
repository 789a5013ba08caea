"""Match sends and receives in the order in which both ends post them, as NCCL does."""

from dataclasses import dataclass, field
from fractions import Fraction

from zorse_megatron.schedules.actions import MATCHING, SENDS, Action, Kind
from zorse_megatron.simulate.network_loads import NetworkLoads
from zorse_megatron.simulate.rank_sizes import RankSizes
from zorse_megatron.simulate.simulation_errors import SimulationError
from zorse_megatron.simulate.task_graph import NOTHING, Role, TaskGraph, Track

Consumer = tuple[int, bool, int | None, int | None]
"""(rank, forward?, chunk, micro-batch): a computation, as a receive names it."""
Samples = int | Fraction
"""Exact, because slices of samples are added up."""


@dataclass(kw_only=True, slots=True)
class Post:
    """One end of a transfer that has been started."""

    rank: int
    position: int
    after: int
    """The task after which it is started."""
    token: object
    """What must be equal at both ends."""
    num_bytes: int = 0
    """What is sent, as the sender says."""
    waiter: Consumer | int | None = None
    """What waits for the transfer at this end."""
    gate: int = NOTHING
    """What else waits for it: the rank, where it stops at each transfer."""


@dataclass(kw_only=True)
class _Endpoints:
    sends: list[Post] = field(default_factory=list)
    receives: list[Post] = field(default_factory=list)


class MatchedTransfers:
    """Collects both ends of all transfers, and then makes them tasks.

    Transfers from one rank to another run one at a time, in order: each direction of each pair is
    one stream (`runtime.transport`). A transfer starts when both ends have started it.
    """

    def __init__(self, graph: TaskGraph, sizes: RankSizes, loads: NetworkLoads) -> None:
        self.graph = graph
        self.sizes = sizes
        self.loads = loads
        self.edges: dict[tuple[int, int], _Endpoints] = {}
        self.consumers: dict[Consumer, tuple[int, int]] = {}
        """Each computation's task, and its position in the rank's list."""

    def start(
        self, action: Action, *, rank: int, position: int, after: int, gate: int = NOTHING
    ) -> None:
        """Note a send or a receive of a list."""
        assert action.samples is not None and action.peer is not None
        kind = action.kind
        if kind in SENDS:
            post = Post(
                rank=rank,
                position=position,
                after=after,
                token=(MATCHING[kind], action.samples, action.positions),
                num_bytes=self.sizes.message_bytes(action),
                gate=gate,
            )
            self._edge(rank, action.peer).sends.append(post)
            return
        forward = kind is Kind.RECEIVE_ACTIVATION
        post = Post(
            rank=rank,
            position=position,
            after=after,
            token=(kind, action.samples, action.positions),
            waiter=(rank, forward, action.chunk, action.micro_batch),
            gate=gate,
        )
        self._edge(action.peer, rank).receives.append(post)

    def swap(
        self, *, rank: int, position: int, peer: int, num_bytes: int, after: int, waiter: int
    ) -> None:
        """Note one end of a swap of equal sizes: a send and a receive, both waited for."""
        post = Post(
            rank=rank,
            position=position,
            after=after,
            token=(Kind.TIE, num_bytes),
            num_bytes=num_bytes,
            waiter=waiter,
        )
        self._edge(rank, peer).sends.append(post)
        self._edge(peer, rank).receives.append(post)

    def match(self, tracks: dict[int, Track]) -> None:
        """Make every transfer a task. Raises SimulationError where two ends do not fit."""
        received: dict[Consumer, Samples] = {}
        for (source, target), edge in self.edges.items():
            if len(edge.sends) != len(edge.receives):
                raise SimulationError(
                    f"from rank {source} to rank {target}: found {len(edge.sends)} sends and "
                    f"{len(edge.receives)} receives; expected as many of both"
                )
            previous = NOTHING
            for send, receive in zip(edge.sends, edge.receives, strict=True):
                if send.token != receive.token:
                    raise SimulationError(
                        f"rank {source} sends {self._word(tracks, send)} where rank {target} has "
                        f"{self._word(tracks, receive)}"
                    )
                previous = self._make(tracks, send, receive, previous)
                if isinstance(receive.waiter, tuple):
                    arrived = _samples_of(tracks[target].actions[receive.position])
                    received[receive.waiter] = received.get(receive.waiter, 0) + arrived
        self._check_inputs(tracks, received)

    def _edge(self, source: int, target: int) -> _Endpoints:
        edge = self.edges.get((source, target))
        if edge is None:
            edge = self.edges[source, target] = _Endpoints()
        return edge

    def _make(self, tracks: dict[int, Track], send: Post, receive: Post, previous: int) -> int:
        work = self.loads.transfer(send.rank, receive.rank, send.num_bytes)
        owner = send.rank, send.position
        task = self.graph.add_work(owner, Role.TRANSFER, work, send.after, receive.after, previous)
        for post in (send, receive):
            track = tracks[post.rank]
            if post.gate != NOTHING:
                self.graph.order(task, post.gate)
            if post.waiter is None:
                track.tasks[post.position] = task
                self.graph.order(task, track.closing_task(post.position))
            elif isinstance(post.waiter, int):
                self.graph.order(task, post.waiter)
                track.gates.setdefault(post.position, []).append(task)
                track.communication.append(task)
            else:
                track.tasks[post.position] = task
                self.graph.order(task, self._consumer(tracks, post, post.waiter))
        return task

    def _consumer(self, tracks: dict[int, Track], post: Post, waiter: Consumer) -> int:
        task, position = self.consumers.get(waiter, (NOTHING, NOTHING))
        if task == NOTHING or position < post.position:
            raise SimulationError(
                f"rank {post.rank} receives {self._word(tracks, post)}, which nothing after it "
                "in its list consumes"
            )
        return task

    def _check_inputs(self, tracks: dict[int, Track], received: dict[Consumer, Samples]) -> None:
        """Every computation has all of its input, as `Mailbox.take` asserts.

        Of a set, every rank its slice.
        """
        slices = {
            rank: Fraction(self.sizes.micro_batch_size(rank), len(self.sizes.set_of(rank)))
            for rank in tracks
        }
        for consumer, (_, position) in self.consumers.items():
            rank = consumer[0]
            action = tracks[rank].actions[position]
            wanted = 0 if self.sizes.has_own_input(action) else slices[rank]
            if received.get(consumer, 0) != wanted:
                raise SimulationError(
                    f"rank {rank} receives {received.get(consumer, 0)} samples for {action}; "
                    f"expected {wanted}"
                )

    @staticmethod
    def _word(tracks: dict[int, Track], post: Post) -> str:
        return str(tracks[post.rank].actions[post.position])


def _samples_of(action: Action) -> Samples:
    """How many samples a receive brings; of a slice of their sequences, so much less."""
    start, stop = action.samples or (0, 0)
    sent = action.positions
    if sent is None:
        return stop - start
    return (stop - start) * Fraction(sent.stop - sent.start, sent.of)
