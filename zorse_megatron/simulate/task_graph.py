"""Tasks and their dependencies, translated from action lists.

Every task starts as soon as all tasks that it waits for are done. Streams, on which tasks run one
after the other, are chains of such waits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from zorse_megatron.schedules.actions import Action
from zorse_megatron.simulate.network import Flow
from zorse_megatron.simulate.network_loads import TaskWork
from zorse_megatron.simulate.residency import Residency

NOTHING = -1
"""In place of a task where there is none; nothing is waited for."""
REPORT = "REPORT"
"""In place of an action: what all ranks are told after their lists."""


class Role(IntEnum):
    """What a task occupies."""

    COMPUTE = 0
    TRANSFER = 1
    COLLECTIVE = 2
    COPY = 3


class TaskGraph:
    """All tasks; each is known by its number."""

    def __init__(self) -> None:
        self.seconds_s: list[float] = []
        """Duration; of a flow: the latency that follows it."""
        self.flows: list[Flow | None] = []
        self.waits_for: list[int] = []
        """How many tasks each waits for."""
        self.waiting: list[list[int]] = []
        """The tasks that wait for each."""
        self.owner: list[tuple[int, int]] = []
        """(rank, position in its list); of several ranks' task: those of one of them."""
        self.roles: list[Role] = []

    def add(self, owner: tuple[int, int], role: Role, seconds_s: float, *after: int) -> int:
        """Add a task that takes a fixed time; returns its number."""
        number = len(self.seconds_s)
        self.seconds_s.append(seconds_s)
        self.flows.append(None)
        self.owner.append(owner)
        self.roles.append(role)
        self.waiting.append([])
        count = 0
        for earlier in after:
            if earlier >= 0:
                self.waiting[earlier].append(number)
                count += 1
        self.waits_for.append(count)
        return number

    def add_work(self, owner: tuple[int, int], role: Role, work: TaskWork, *after: int) -> int:
        """Add a task that may put bytes on links."""
        number = self.add(owner, role, work.seconds_s, *after)
        self.flows[number] = work.flow
        return number

    def order(self, earlier: int, later: int) -> None:
        """Let `later` wait for `earlier`, where both are there."""
        if earlier >= 0 and later >= 0:
            self.waiting[earlier].append(later)
            self.waits_for[later] += 1


@dataclass(kw_only=True)
class Track:
    """One rank's list as tasks. Lists are by position in the list."""

    rank: int
    actions: tuple[Action, ...]
    residency: Residency
    """Where its parameters are meanwhile."""
    tasks: list[int] = field(default_factory=list)
    """The task that does the action, or ends it."""
    starts: dict[int, int] = field(default_factory=dict)
    """Position of an action of several tasks -> the first of them."""
    before: list[int] = field(default_factory=list)
    """The last task on the rank's main stream when the action's turn comes."""
    openings: Mapping[int, int] = field(default_factory=dict)
    """Position of a receive -> position at whose turn its buffer is opened."""
    closings: Mapping[int, int] = field(default_factory=dict)
    """Position of a send -> position at whose turn it must have left."""
    own: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Position -> tasks of this rank beside the main stream that the action waits for."""
    gates: dict[int, list[int]] = field(default_factory=dict)
    """Position -> the communication inside an action, before which it waits for other ranks."""
    main: list[int] = field(default_factory=list)
    """The main stream: tasks that run one after the other and stop whatever follows them."""
    communication: list[int] = field(default_factory=list)
    """Collectives that the rank takes part in, and swaps of the tied embedding."""
    copies: dict[int, int] = field(default_factory=dict)
    """Position of a forward (backward) -> copy of its activations to (from) the host; of a STEP
    -> copies of gradients from the host for their norm."""

    brings: dict[int, int] = field(default_factory=dict)
    """Position of a computation -> that of the backward after it, whose copy begins with it."""
    left: dict[int, int] = field(default_factory=dict)
    """Position of a forward -> the task at whose end its activations are off the GPU."""

    def first_task(self, position: int) -> int:
        """The task that an action begins with."""
        return self.starts.get(position, self.tasks[position])

    def closing_task(self, send: int) -> int:
        """The task that waits until a send has left, or NOTHING."""
        at = self.closings.get(send, len(self.actions))
        if at == len(self.actions):
            return NOTHING
        return self.tasks[at]


@dataclass(frozen=True, kw_only=True)
class Program:
    """Everything that is simulated: the tasks of all simulated ranks."""

    graph: TaskGraph
    tracks: Mapping[int, Track]
    capacities_bytes_per_s: tuple[float, ...]

    def word(self, task: int) -> str:
        """The action that a task belongs to, or REPORT."""
        rank, position = self.graph.owner[task]
        actions = self.tracks[rank].actions
        return str(actions[position]) if position < len(actions) else REPORT


def live(tasks: Iterable[int | None]) -> tuple[int, ...]:
    """Tasks only, without placeholders."""
    return tuple(task for task in tasks if task is not None and task >= 0)
