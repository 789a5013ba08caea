"""Sends and receives, matched as both ends post them; where stock Megatron posts them."""

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from zorse_megatron.schedule.actions import COMPUTE, MATCHING, RECEIVES, SENDS, Action, Kind
from zorse_megatron.simulate.assumptions import SimulationError
from zorse_megatron.simulate.network import NetworkLoads
from zorse_megatron.simulate.rank_bytes import RankSizes
from zorse_megatron.simulate.tasks import NOTHING, Role, TaskGraph, Track

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


class MatchedTransfers:
    """Collects both ends of all transfers, and then makes them tasks.

    Transfers from one rank to another run one at a time, in order: each direction of each pair is
    one stream (`runtime.transport`). A transfer starts when both ends have started it.
    """

    def __init__(self, graph: TaskGraph, sizes: RankSizes, loads: NetworkLoads) -> None:
        self.graph = graph
        self.sizes = sizes
        self.loads = loads
        self.edges = defaultdict[tuple[int, int], tuple[list[Post], list[Post]]](lambda: ([], []))
        """(source, target) -> sends and receives, in the order of each one's list."""
        self.consumers: dict[Consumer, tuple[int, int]] = {}
        """Each computation's task, and its position in the rank's list."""

    def start(
        self, action: Action, *, rank: int, position: int, after: int, gate: int = NOTHING
    ) -> None:
        """Note a send or a receive of a list."""
        assert action.samples is not None and action.peer is not None
        kind, sends = action.kind, action.kind in SENDS
        waiter = None if sends else (rank, *action.computation)
        post = Post(
            rank=rank,
            position=position,
            after=after,
            token=(MATCHING[kind] if sends else kind, action.samples, action.positions),
            num_bytes=self.sizes.crossing_bytes(action) if sends else 0,
            waiter=waiter,
            gate=gate,
        )
        if sends:
            self.edges[rank, action.peer][0].append(post)
        else:
            self.edges[action.peer, rank][1].append(post)

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
        self.edges[rank, peer][0].append(post)
        self.edges[peer, rank][1].append(post)

    def match(self, tracks: dict[int, Track]) -> None:
        """Make every transfer a task. Raises SimulationError where two ends do not fit."""
        received: dict[Consumer, Samples] = {}
        for (source, target), (sends, receives) in self.edges.items():
            if len(sends) != len(receives):
                raise SimulationError(
                    f"from rank {source} to rank {target}: found {len(sends)} sends and "
                    f"{len(receives)} receives; expected as many of both"
                )
            previous = NOTHING
            for send, receive in zip(sends, receives, strict=True):
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
                self.graph.order(task, track.wait_task(post.position))
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

        Of a TP group, every rank its slice.
        """
        for consumer, (_, position) in self.consumers.items():
            rank = consumer[0]
            action = tracks[rank].actions[position]
            wanted: Samples = 0
            if not self.sizes.has_own_input(action):
                assert action.micro_batch is not None
                size, replica = (
                    self.sizes.size_of(rank, action.micro_batch),
                    self.sizes.replica(rank),
                )
                wanted = Fraction(size, len(replica.ranks))
                if replica.expert_parallel is not None:
                    wanted = replica.expert_parallel.samples[replica.ranks.index(rank)]
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


# Where Megatron's schedules post their transfers.
#
# Interleaved: `forward_backward_pipelining_with_interleaving` of Megatron-Core 0.19.2, with
# `--overlap-p2p-communication-warmup-flush`: behind a computation it posts the send of what was
# computed, and with it the receive for the next computation of the same kind. Ranks other than the
# first (last) post receives of forwards in the warm-up (of backwards in the cool-down) one
# computation sooner. So a rank that computes slowly posts late, and its neighbour, which stops
# until its activation has left, waits for that.
#
# 1F1B: `forward_backward_pipelining_without_interleaving` sends what was computed and receives what
# is computed next, both at once if one is an activation and the other a gradient
# (`send_forward_recv_backward`), and goes on when both are done.


_BEFORE, _AS_IT_IS, _BEHIND = range(3)


def with_receives_posted(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The passes of a rank's list, with receives where Megatron posts them."""
    forwards, backwards = (_positions(actions, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
    if not forwards or not backwards:
        return tuple(actions)
    ready = sum(position < backwards[0] for position in forwards)
    # The first backward has a forward of the steady state before it, where there is one.
    warm_up = ready if ready == len(forwards) else ready - 1
    steady = len(forwards) - warm_up
    consumers = {
        actions[at].computation: n for s in (forwards, backwards) for n, at in enumerate(s)
    }
    fed = {action.computation for action in actions if action.kind in RECEIVES}
    is_first = actions[forwards[0]].computation not in fed
    is_last = actions[backwards[0]].computation not in fed

    def place(position: int) -> tuple[int, int]:
        action = actions[position]
        if action.kind not in RECEIVES:
            return position, _AS_IT_IS
        number = consumers[action.computation]
        if action.kind is Kind.RECV_F and number:
            is_early = number <= warm_up and not is_first
            return forwards[number - 1], _BEFORE if is_early else _BEHIND
        if action.kind is Kind.RECV_B and number:
            is_early = number > steady and not is_last
            return backwards[number - 1], _BEFORE if is_early else _BEHIND
        if action.kind is Kind.RECV_B and steady:
            return forwards[warm_up], _BEFORE
        return position, _AS_IT_IS

    order = sorted(range(len(actions)), key=place)
    return tuple(actions[position] for position in order)


def with_receives_at_last(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The same of 1F1B: each just before what it is for, so behind the sends that precede that."""
    consumers = {
        action.computation: at for at, action in enumerate(actions) if action.kind in COMPUTE
    }

    def place(position: int) -> tuple[int, int]:
        action = actions[position]
        if action.kind in RECEIVES:
            return consumers[action.computation], _BEFORE
        return position, _AS_IT_IS

    return tuple(actions[position] for position in sorted(range(len(actions)), key=place))


def gradients_waited_at(actions: Sequence[Action]) -> Mapping[int, int]:
    """Position of each gradient's send -> position of the action before which it must have left.

    The rank waits for it when it has posted the next one. For an activation it waits at once.
    """
    last = next((at for at, a in enumerate(actions) if a.kind is Kind.NORM), len(actions))
    backwards = [*_positions(actions, Kind.BACKWARD), last]
    computations = [at for at, action in enumerate(actions) if action.kind in COMPUTE]
    waited_at = {}
    for position in _positions(actions, Kind.SEND_B):
        following = backwards[bisect(backwards, position)]
        behind = bisect(computations, following)
        waited_at[position] = computations[behind] if behind < len(computations) else last
    return waited_at


def _positions(actions: Sequence[Action], kind: Kind) -> list[int]:
    return [at for at, action in enumerate(actions) if action.kind is kind]
