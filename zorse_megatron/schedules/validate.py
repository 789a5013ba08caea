"""Proof that action lists can be executed: they are played with the runtime's own rules.

The rules: a rank runs its list in order; a send or a receive starts a transfer and never waits; a
forward or backward waits for the receives that it consumes; transfers between two ranks in one
direction are matched in the order in which they were started (NCCL has no tags). If the play gets
stuck, or two ends of a transfer do not fit, the error shows where every rank stands.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from zorse_megatron.schedules.actions import (
    COMPUTE,
    MATCHING,
    RECEIVES,
    SENDS,
    Action,
    ActionLists,
    Kind,
)


class ScheduleError(Exception):
    """Action lists that cannot be executed."""


@dataclass(kw_only=True)
class _Edge:
    """Transfers from one rank to another that were started at one end only."""

    sends: deque[tuple[int, Action]] = field(default_factory=deque)
    receives: deque[tuple[int, Action]] = field(default_factory=deque)


def check_executable(lists: ActionLists, *, blocking: bool = False) -> None:
    """Play the lists to the end. Raises ScheduleError where they get stuck or do not match.

    With `blocking`, every send and receive waits for its other end, as with unbuffered blocking
    calls: stricter than the runtime, and met by lists before their receives are moved forward.
    """
    player = _Player(lists, blocking=blocking)
    player.run()


class _Player:
    def __init__(self, lists: ActionLists, *, blocking: bool) -> None:
        self.lists = lists.ranks
        self.blocking = blocking
        self.position = [0] * len(self.lists)
        self.edges: dict[tuple[int, int], _Edge] = defaultdict(_Edge)
        self.arrived: set[tuple[int, int]] = set()
        self.inputs = [_inputs(actions) for actions in self.lists]
        self.started: set[tuple[int, int]] = set()

    def run(self) -> None:
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.lists)):
                while self._advance(rank):
                    progress = True
        if any(self.position[r] < len(actions) for r, actions in enumerate(self.lists)):
            raise ScheduleError(f"no rank can go on:\n{self._grid()}")
        for (source, target), edge in self.edges.items():
            if edge.sends or edge.receives:
                raise ScheduleError(
                    f"from rank {source} to rank {target}: {len(edge.sends)} sends and "
                    f"{len(edge.receives)} receives have no other end"
                )

    def _advance(self, rank: int) -> bool:
        at = self.position[rank]
        if at == len(self.lists[rank]):
            return False
        action = self.lists[rank][at]
        if action.kind in SENDS | RECEIVES:
            if (rank, at) not in self.started:
                self.started.add((rank, at))
                self._start(rank, at, action)
            if self.blocking and (rank, at) not in self.arrived:
                return False
        elif action.kind in COMPUTE and not self._inputs_arrived(rank, at, action):
            return False
        self.position[rank] += 1
        return True

    def _start(self, rank: int, at: int, action: Action) -> None:
        assert action.peer is not None
        sending = action.kind in SENDS
        edge = self.edges[(rank, action.peer) if sending else (action.peer, rank)]
        mine, theirs = (edge.sends, edge.receives) if sending else (edge.receives, edge.sends)
        mine.append((at, action))
        if not theirs:
            return
        (send_at, send), (receive_at, receive) = edge.sends.popleft(), edge.receives.popleft()
        source, target = (rank, action.peer) if sending else (action.peer, rank)
        if MATCHING[send.kind] != receive.kind or send.samples != receive.samples:
            raise ScheduleError(f"rank {source} sends {send} where rank {target} has {receive}")
        self.arrived |= {(source, send_at), (target, receive_at)}

    def _inputs_arrived(self, rank: int, at: int, action: Action) -> bool:
        needed = self.inputs[rank].get(_consumer(action), ())
        return all(earlier < at and (rank, earlier) in self.arrived for earlier in needed)

    def _grid(self) -> str:
        lines = []
        for rank, actions in enumerate(self.lists):
            at = self.position[rank]
            words = [str(a) for a in actions[max(0, at - 3) : at]]
            culprit = [f"»{actions[at]}«"] if at < len(actions) else ["(done)"]
            lines.append(f"rank {rank} at {at}: {' '.join(words + culprit)}")
        return "\n".join(lines)


def _consumer(action: Action) -> tuple[bool, int | None, int | None]:
    """What a receive is for, and what a computation consumes: (forward?, chunk, micro-batch)."""
    forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
    return forward, action.chunk, action.micro_batch


def _inputs(
    actions: tuple[Action, ...],
) -> dict[tuple[bool, int | None, int | None], list[int]]:
    """Positions of the receives that each computation consumes."""
    found: dict[tuple[bool, int | None, int | None], list[int]] = defaultdict(list)
    for at, action in enumerate(actions):
        if action.kind in RECEIVES:
            found[_consumer(action)].append(at)
    return found
