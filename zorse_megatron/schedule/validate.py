"""Checks that action lists can execute, by simulating them with the runtime's rules.

The rules: a rank runs its list in order; every send and receive waits for its other end, and a
collective for all its ranks, as unbuffered blocking calls do; a forward or backward needs the
receives that it consumes before it, and all ranks of its tensor-parallel group; a weight gradient,
where a chunk has them, stands between its backward and the chunk's REDUCE_GRAD; transfers between
two ranks in one direction are matched in the order in which they stand in the lists (NCCL has no
tags). This is stricter than the runtime, where only what needs the result waits. If the dry run
gets stuck, or two ends of a transfer do not fit, the error shows where every rank stands.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import (
    COMPUTE,
    MATCHING,
    ON_LAYERS,
    RECEIVES,
    SENDS,
    TRANSFERS,
    Action,
    ActionLists,
    Kind,
)
from zorse_megatron.schedule.samples import MicroBatch, rank_micro_batches

_COLLECTIVES = frozenset({Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.SCALE, Kind.NORM})
"""TIE is not among them: it swaps with single ranks, and nothing but the update follows it."""

_Collective = tuple[Kind | Action, int | None]
"""(kind, chunk), or (a computation, first rank of its TP group)."""
_Computation = tuple[bool, int | None, int | None]
"""(forward?, chunk, micro-batch)."""


class ScheduleError(Exception):
    """Action lists that cannot be executed."""


def check_executable(lists: ActionLists, tp_groups: Iterable[tuple[int, ...]] = ()) -> None:
    """Dry-run the lists to the end. Raises ScheduleError where they get stuck or do not match.

    `tp_groups`: ranks that compute together.
    """
    _DryRun(lists, tp_groups).run()


def executes_in_order(plan: Plan, lists: ActionLists) -> bool:
    """Whether they also do where each backward waits for the forwards of all earlier samples of its
    chunk, on any rank."""
    try:
        _DryRunInOrder(plan, lists).run()
    except ScheduleError:
        return False
    return True


class _DryRun:
    def __init__(self, lists: ActionLists, tp_groups: Iterable[tuple[int, ...]]) -> None:
        self.lists = lists.ranks
        self.tp_group_of = {rank: ranks for ranks in tp_groups for rank in ranks if len(ranks) > 1}
        self.position = [0] * len(self.lists)
        for rank, actions in enumerate(self.lists):
            _check_inputs(rank, actions)
            _check_weight_gradients(rank, actions)
        self.members = self._members()
        self.present: dict[_Collective, set[int]] = defaultdict(set)
        """Ranks that stand at a collective."""
        self.awake = deque(range(len(self.lists)))
        """Ranks that may be able to go on."""

    def _members(self) -> dict[_Collective, set[int]]:
        members: dict[_Collective, set[int]] = defaultdict(set)
        for rank, actions in enumerate(self.lists):
            for action in actions:
                if self._is_collective(rank, action):
                    members[self._key(rank, action)].add(rank)
        return members

    def _is_collective(self, rank: int, action: Action) -> bool:
        return action.kind in _COLLECTIVES or (
            action.kind in ON_LAYERS and rank in self.tp_group_of
        )

    def _key(self, rank: int, action: Action) -> _Collective:
        if action.kind in ON_LAYERS:
            return action, self.tp_group_of[rank][0]
        return action.kind, action.chunk

    def run(self) -> None:
        while self.awake:
            rank = self.awake.popleft()
            while self._advance(rank):
                pass
        if any(self.position[r] < len(actions) for r, actions in enumerate(self.lists)):
            raise ScheduleError(f"no rank can proceed:\n{self._grid()}")

    def _advance(self, rank: int) -> bool:
        action = self._standing(rank)
        if action is None:
            return False
        if action.kind in TRANSFERS:
            return self._transfer(rank, action)
        if self._is_collective(rank, action):
            return self._join(rank, action)
        self.position[rank] += 1
        return True

    def _standing(self, rank: int) -> Action | None:
        at, actions = self.position[rank], self.lists[rank]
        return actions[at] if at < len(actions) else None

    def _transfer(self, rank: int, action: Action) -> bool:
        """Do it if its other end is what the peer stands at."""
        assert action.peer is not None
        other = self._standing(action.peer)
        if other is None or other.peer != rank or (other.kind in SENDS) == (action.kind in SENDS):
            return False
        ends = [(rank, action), (action.peer, other)]
        (source, send), (target, receive) = ends if action.kind in SENDS else reversed(ends)
        what = send.samples, send.positions
        if MATCHING[send.kind] != receive.kind or what != (receive.samples, receive.positions):
            raise ScheduleError(f"rank {source} sends {send} where rank {target} has {receive}")
        for end in (source, target):
            self.position[end] += 1
        self.awake.append(action.peer)
        return True

    def _join(self, rank: int, action: Action) -> bool:
        key = self._key(rank, action)
        self.present[key].add(rank)
        if self.present[key] != self.members[key]:
            return False
        for member in self.present.pop(key):
            self.position[member] += 1
            self.awake.append(member)
        return True

    def _grid(self) -> str:
        lines = []
        for rank, actions in enumerate(self.lists):
            at = self.position[rank]
            listed = [str(a) for a in actions[max(0, at - 3) : at]]
            culprit = [f"»{actions[at]}«"] if at < len(actions) else ["(done)"]
            lines.append(f"rank {rank} at {at}: {' '.join(listed + culprit)}")
        return "\n".join(lines)


class _DryRunInOrder(_DryRun):
    def __init__(self, plan: Plan, lists: ActionLists) -> None:
        super().__init__(lists, [each.ranks for group in plan.groups for each in group.replicas])
        self.micro_batches = [rank_micro_batches(plan, rank) for rank in range(plan.world_size)]
        self.forwards: dict[int | None, list[tuple[int, int, int]]] = defaultdict(list)
        """Chunk -> first sample, rank and place of each forward, in the order of samples."""
        for rank, actions in enumerate(self.lists):
            for place, action in enumerate(actions):
                if action.kind is Kind.FORWARD and self._samples(rank, action).size:
                    start = self._samples(rank, action).start
                    self.forwards[action.chunk].append((start, rank, place))
        for each in self.forwards.values():
            each.sort()
        self.num_done = dict.fromkeys(self.forwards, 0)
        """Chunk -> how many of them, from the first on, have been done."""

    def _samples(self, rank: int, action: Action) -> MicroBatch:
        assert action.micro_batch is not None
        return self.micro_batches[rank][action.micro_batch]

    def _advance(self, rank: int) -> bool:
        action = self._standing(rank)
        if action is None or action.kind not in (Kind.FORWARD, Kind.BACKWARD):
            return super()._advance(rank)
        if action.kind is Kind.BACKWARD and not self._may_start(rank, action):
            return False
        has_advanced = super()._advance(rank)
        if has_advanced and action.kind is Kind.FORWARD:
            self.awake.extend(other for _, other, _ in self.forwards[action.chunk])
        return has_advanced

    def _may_start(self, rank: int, action: Action) -> bool:
        order, number = self.forwards[action.chunk], self.num_done[action.chunk]
        while number < len(order) and self.position[order[number][1]] > order[number][2]:
            number += 1
        self.num_done[action.chunk] = number
        mine = self._samples(rank, action)
        return number == len(order) or order[number][0] >= mine.start


def _check_inputs(rank: int, actions: tuple[Action, ...]) -> None:
    """Raise ScheduleError where a rank computes something before what that consumes."""
    receives: dict[_Computation, int] = {}
    places: dict[_Computation, int] = {}
    for at, action in enumerate(actions):
        if action.kind in RECEIVES:
            receives[action.computation] = at
        elif action.kind in COMPUTE:
            places[action.computation] = at
    for (forward, chunk, micro_batch), at in places.items():
        assert chunk is not None
        neighbour = forward, chunk - 1 if forward else chunk + 1, micro_batch
        needed = [neighbour] if forward else [neighbour, (True, chunk, micro_batch)]
        last = receives.get((forward, chunk, micro_batch), -1)
        if last > at or any(places.get(one, at) > at for one in needed):
            raise ScheduleError(f"rank {rank} has {actions[at]} before what it consumes")


def _check_weight_gradients(rank: int, actions: tuple[Action, ...]) -> None:
    """Raise ScheduleError where a chunk that has some lacks one, or has it too early or late."""
    split = {action.chunk for action in actions if action.kind is Kind.WEIGHT_GRADIENT}
    waiting: set[tuple[int | None, int | None]] = set()
    for action in actions if split else ():
        key = action.chunk, action.micro_batch
        if action.kind is Kind.BACKWARD and action.chunk in split:
            waiting.add(key)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            if key not in waiting:
                raise ScheduleError(f"rank {rank} has {action} before its backward, or twice")
            waiting.remove(key)
        elif action.kind is Kind.REDUCE_GRAD and any(chunk == action.chunk for chunk, _ in waiting):
            raise ScheduleError(f"rank {rank} has {action} before all gradients of weights")
    if waiting:
        raise ScheduleError(f"rank {rank} lacks weight gradients of (chunk, micro-batch) {waiting}")
