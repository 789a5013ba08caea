"""Summarize the critical path: where the iteration spends its time."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zorse_megatron.schedules.actions import TRANSFERS, Kind, parse_action
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.task_graph import REPORT

if TYPE_CHECKING:
    from zorse_megatron.simulate.result import SimulationResult

_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT_GRADIENT: "weight gradients",
    **dict.fromkeys(TRANSFERS, "transfers between groups"),
    Kind.REDUCE: "sums of gradients",
    Kind.TIE: "the tied embedding",
    **dict.fromkeys((Kind.SCALE, Kind.NORM), "statistics"),
    Kind.STEP: "optimizer step",
    Kind.GATHER: "gathers of parameters",
    **dict.fromkeys(
        (Kind.RELEASE, Kind.OFFLOAD, Kind.FETCH, Kind.OFFLOAD_GRADIENTS),
        "copies to and from the host",
    ),
}
_MAX_LISTED = 6
_NAMES_IN_ORDER = tuple(dict.fromkeys(_NAMES.values()))


@dataclass(frozen=True, kw_only=True)
class CriticalShares:
    """Seconds of the critical path."""

    by_work: dict[str, float]
    by_group: dict[int, float]
    contention_s: float
    """Time that transfers and collectives lose to contention for links."""
    num_steps: int


def critical_shares(plan: Plan, result: "SimulationResult") -> CriticalShares:
    """Add up the steps of the critical path."""
    by_work: dict[str, float] = dict.fromkeys(_NAMES_IN_ORDER, 0.0)
    by_group: dict[int, float] = defaultdict(float)
    contention_s = 0.0
    groups = {rank: number for number, group in enumerate(plan.groups) for rank in group.ranks}
    for step in result.critical_path:
        took_s = step.end_s - step.start_s
        by_work[_name(step.action)] += took_s
        by_group[groups[step.rank]] += took_s
        contention_s += step.contention_s
    return CriticalShares(
        by_work={name: took_s for name, took_s in by_work.items() if took_s},
        by_group=dict(sorted(by_group.items())),
        contention_s=contention_s,
        num_steps=len(result.critical_path),
    )


def _name(word: str) -> str:
    if word == REPORT:
        return _NAMES[Kind.SCALE]
    return _NAMES[parse_action(word).kind]


def critical_lines(plan: Plan, result: "SimulationResult") -> list[str]:
    """The critical path for people."""
    shares = critical_shares(plan, result)
    whole_s = result.iteration_s or 1.0

    def spelt(items: list[tuple[str, float]]) -> str:
        ordered = sorted(items, key=lambda item: -item[1])
        percents = [(name, 100 * took_s / whole_s) for name, took_s in ordered[:_MAX_LISTED]]
        listed = [f"{name} {value:.1f} %" for name, value in percents if value >= 0.05]
        return ", ".join(listed) + ", ..." * (len(ordered) > _MAX_LISTED)

    names = {number: group.name or f"group {number}" for number, group in enumerate(plan.groups)}
    lines = [
        f"critical path: {spelt(list(shares.by_work.items()))}",
        f"critical path by group: {spelt([(names[n], s) for n, s in shares.by_group.items()])}",
    ]
    if shares.contention_s > 0.001 * whole_s:
        percent = 100 * shares.contention_s / whole_s
        lines.append(f"of which link contention: {percent:.1f} %")
    return lines


def critical_as_json(plan: Plan, result: "SimulationResult") -> dict[str, Any]:
    """The critical path for programs."""
    shares = critical_shares(plan, result)
    return {
        "by_work_s": shares.by_work,
        "by_group_s": {str(number): took_s for number, took_s in shares.by_group.items()},
        "contention_s": shares.contention_s,
        "num_steps": shares.num_steps,
    }
