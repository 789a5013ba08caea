"""The critical path: backwards from the end, always to the last dependency to finish."""

from dataclasses import dataclass
from enum import StrEnum

from zorse_megatron.simulate.task_graph import NOTHING, Program, Role
from zorse_megatron.simulate.timeline import Timeline


class Reason(StrEnum):
    """Why an action on the critical path did not start earlier."""

    START = "it starts the iteration"
    SAME_RANK = "the rank did what precedes it in its list"
    DATA = "the data had to arrive"
    SENDER = "the sender had to come so far"
    RECEIVER = "the receiver had to come so far"
    SAME_PAIR = "the transfer before it between the same ranks was under way"
    LAST_RANK = "this rank of the group had to come so far"
    COLLECTIVE = "a collective of its group was under way"
    COPY = "a copy to or from the host was under way"


@dataclass(frozen=True, kw_only=True)
class CriticalStep:
    """One action on the critical path. It starts when the step before it ends."""

    rank: int
    """Of a transfer: the sender; of a collective: the rank that came last."""
    action: str
    start_s: float
    end_s: float
    reason: Reason
    """Why it did not start earlier."""
    contention_s: float = 0.0
    """How much longer it took than on idle links."""


def critical_path(timeline: Timeline) -> tuple[CriticalStep, ...]:
    """The steps in the order of time. Without gaps: their durations add up to the iteration.

    Tasks that take no time are left out, but for the last.
    """
    times = timeline.times
    if not times.end_s:
        return ()
    task = max(range(len(times.end_s)), key=times.end_s.__getitem__)
    steps: list[CriticalStep] = []
    while task != NOTHING:
        if times.end_s[task] > times.start_s[task] or not steps:
            steps.append(_step(timeline, task))
        task = times.cause[task]
    return tuple(reversed(steps))


def _step(timeline: Timeline, task: int) -> CriticalStep:
    graph, times = timeline.program.graph, timeline.times
    cause = times.cause[task]
    rank, _ = graph.owner[task]
    if graph.roles[task] is Role.COLLECTIVE and cause != NOTHING:
        rank = graph.owner[cause][0]
    took_s = times.end_s[task] - times.start_s[task]
    flow = graph.flows[task]
    alone_s = graph.seconds_s[task]
    if flow is not None:
        alone_s += flow.num_bytes / flow.limit_bytes_per_s
    return CriticalStep(
        rank=rank,
        action=timeline.program.word(task),
        start_s=times.start_s[task],
        end_s=times.end_s[task],
        reason=_reason(timeline.program, task, cause),
        contention_s=max(0.0, took_s - alone_s) if flow is not None else 0.0,
    )


_BEHIND = {
    Role.TRANSFER: Reason.DATA,
    Role.COLLECTIVE: Reason.COLLECTIVE,
    Role.COPY: Reason.COPY,
    Role.COMPUTE: Reason.SAME_RANK,
}
"""Why something on a rank's own streams waited, by what it waited for."""


def _reason(program: Program, task: int, cause: int) -> Reason:
    graph = program.graph
    if cause == NOTHING:
        return Reason.START
    if graph.roles[task] is Role.COLLECTIVE:
        return Reason.LAST_RANK
    if graph.roles[task] is not Role.TRANSFER:
        return _BEHIND[graph.roles[cause]]
    if graph.roles[cause] is Role.TRANSFER:
        return Reason.SAME_PAIR
    return Reason.SENDER if graph.owner[cause][0] == graph.owner[task][0] else Reason.RECEIVER
