"""Check that action lists can execute, by simulating them with the runtime's rules.

The rules: a rank runs its list in order; a send or a receive starts a transfer and never waits; a
forward or backward waits for the receives that it consumes; transfers between two ranks in one
direction are matched in the order in which they were started (NCCL has no tags). A collective is
done when all its ranks have come to it, and none of them goes on before: stricter than the runtime,
where only what needs the result waits. If the dry run gets stuck, or two ends of a transfer do not
fit, the error shows where every rank stands.
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

_COLLECTIVES = frozenset({Kind.REDUCE, Kind.GATHER, Kind.SCALE, Kind.STEP})
"""TIE is not among them: it swaps with single ranks, and nothing but SCALE and STEP follows it."""

_Collective = tuple[Kind, int | None]
_Computation = tuple[bool, int | None, int | None]
"""(forward?, chunk, micro-batch)."""


class ScheduleError(Exception):
    """Action lists that cannot be executed."""


@dataclass(kw_only=True)
class _Edge:
    """Transfers from one rank to another that were started at one end only."""

    sends: deque[tuple[int, Action]] = field(default_factory=deque)
    receives: deque[tuple[int, Action]] = field(default_factory=deque)


def check_executable(lists: ActionLists, *, blocking: bool = False) -> None:
    """Dry-run the lists to the end. Raises ScheduleError where they get stuck or do not match.

    With `blocking`, every send and receive waits for its other end, as with unbuffered blocking
    calls: stricter than the runtime, and met by lists before their receives are moved forward.
    """
    _DryRun(lists, blocking=blocking).run()


class _DryRun:
    def __init__(self, lists: ActionLists, *, blocking: bool) -> None:
        self.lists = lists.ranks
        self.blocking = blocking
        self.position = [0] * len(self.lists)
        self.edges: dict[tuple[int, int], _Edge] = defaultdict(_Edge)
        self.arrived: set[tuple[int, int]] = set()
        self.started: set[tuple[int, int]] = set()
        self.inputs = [_inputs(rank, actions) for rank, actions in enumerate(self.lists)]
        self.members = self._members()
        self.present: dict[_Collective, set[int]] = defaultdict(set)
        """Ranks that stand at a collective."""
        self.awake = deque(range(len(self.lists)))
        """Ranks that may be able to go on."""

    def _members(self) -> dict[_Collective, set[int]]:
        members: dict[_Collective, set[int]] = defaultdict(set)
        for rank, actions in enumerate(self.lists):
            for action in actions:
                if action.kind in _COLLECTIVES:
                    members[action.kind, action.chunk].add(rank)
        return members

    def run(self) -> None:
        while self.awake:
            rank = self.awake.popleft()
            while self._advance(rank):
                pass
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
        elif action.kind in COMPUTE:
            if not self._inputs_arrived(rank, at, action):
                return False
        elif action.kind in _COLLECTIVES:
            return self._join(rank, action)
        self.position[rank] += 1
        return True

    def _join(self, rank: int, action: Action) -> bool:
        key = action.kind, action.chunk
        self.present[key].add(rank)
        if self.present[key] != self.members[key]:
            return False
        for member in self.present.pop(key):
            self.position[member] += 1
            self.awake.append(member)
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
        self.awake.append(action.peer)

    def _inputs_arrived(self, rank: int, at: int, action: Action) -> bool:
        needed = self.inputs[rank].get(_consumer(action), ())
        return all(earlier < at and (rank, earlier) in self.arrived for earlier in needed)

    def _grid(self) -> str:
        lines = []
        for rank, actions in enumerate(self.lists):
            at = self.position[rank]
            listed = [str(a) for a in actions[max(0, at - 3) : at]]
            culprit = [f"»{actions[at]}«"] if at < len(actions) else ["(done)"]
            lines.append(f"rank {rank} at {at}: {' '.join(listed + culprit)}")
        return "\n".join(lines)


def _consumer(action: Action) -> _Computation:
    """What a receive is for, and what a computation consumes."""
    forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
    return forward, action.chunk, action.micro_batch


def _inputs(rank: int, actions: tuple[Action, ...]) -> dict[_Computation, list[int]]:
    """Positions of the receives that each computation consumes.

    Raises ScheduleError where a rank computes a chunk before its own part of what that consumes.
    """
    found: dict[_Computation, list[int]] = defaultdict(list)
    places: dict[_Computation, int] = {}
    for at, action in enumerate(actions):
        if action.kind in RECEIVES:
            found[_consumer(action)].append(at)
        elif action.kind in COMPUTE:
            places[_consumer(action)] = at
    for (forward, chunk, micro_batch), at in places.items():
        assert chunk is not None
        neighbour = forward, chunk - 1 if forward else chunk + 1, micro_batch
        needed = [neighbour] if forward else [neighbour, (True, chunk, micro_batch)]
        if any(places.get(one, at) > at for one in needed):
            raise ScheduleError(f"rank {rank} has {actions[at]} before what it consumes")
    return found
