"""Summarize the critical path: where the iteration spends its time."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zorse_megatron.schedules.actions import TRANSFERS, Kind, parse_action
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.figures import percent
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.task_graph import REPORT

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
_MAX_LISTED = 4


@dataclass(frozen=True, kw_only=True)
class CriticalShares:
    """Seconds of the critical path, largest first."""

    by_work_s: dict[str, float]
    by_group_s: dict[str, float]
    """By the group's number."""
    contention_s: float
    """Time that transfers and collectives lose to contention for links."""
    num_steps: int


def critical_shares(plan: Plan, result: SimulationResult) -> CriticalShares:
    """Add up the steps of the critical path."""
    by_work_s: Counter[str] = Counter()
    by_group_s: Counter[str] = Counter()
    contention_s = 0.0
    groups = {rank: str(number) for number, each in enumerate(plan.groups) for rank in each.ranks}
    for step in result.critical_path:
        took_s = step.end_s - step.start_s
        by_work_s[_name(step.action)] += took_s  # type: ignore[assignment]
        by_group_s[groups[step.rank]] += took_s  # type: ignore[assignment]
        contention_s += step.contention_s
    return CriticalShares(
        by_work_s=dict(by_work_s.most_common()),
        by_group_s=dict(by_group_s.most_common()),
        contention_s=contention_s,
        num_steps=len(result.critical_path),
    )


def _name(word: str) -> str:
    return _NAMES[Kind.SCALE if word == REPORT else parse_action(word).kind]


def critical_sentences(plan: Plan, shares: CriticalShares, iteration_s: float) -> Iterator[str]:
    """Yield where an iteration spends its time."""
    names = {
        str(number): group.name or f"group {number}" for number, group in enumerate(plan.groups)
    }
    by_group_s = {names[number]: took_s for number, took_s in shares.by_group_s.items()}
    yield f"Critical path: {_listed(shares.by_work_s, iteration_s)}."
    yield f"Critical path by group: {_listed(by_group_s, iteration_s)}."
    if shares.contention_s > 0.001 * iteration_s:
        yield f"Of which link contention: {percent(shares.contention_s / iteration_s)}."


def _listed(seconds: Mapping[str, float], iteration_s: float) -> str:
    shares = [(name, took_s / iteration_s) for name, took_s in seconds.items()]
    listed = [f"{name} {percent(share)}" for name, share in shares[:_MAX_LISTED] if share > 0.0005]
    return ", ".join(listed)
