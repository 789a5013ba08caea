"""The answer of `zorse plan`, as text and as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zorse_megatron.cli.console import gib, print_plain
from zorse_megatron.cli.plan_table import plan_line, print_plan
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import PlanError
from zorse_megatron.schedules.refusals import refuse_unsupported
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.strict import plain
from zorse_megatron.software.torch_builds import build_notes

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome

_MAX_REJECTED = 5
_MAX_REASONS = 3


def not_trainable_yet(found: Plan) -> str | None:
    """Say why this version cannot train a plan; None where it can."""
    try:
        refuse_unsupported(found)
    except PlanError as error:
        reasons = [f"{each.where} has {each.found}" for each in error.problems]
        more = f" and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
        listed = ", ".join(dict.fromkeys(reasons[:_MAX_REASONS]))
        return f"this version cannot train this plan yet: {listed}{more}"
    return None


def print_answer(
    costs: WorkloadCosts, outcome: "Outcome", sentences: tuple[str, ...], out: Path | None
) -> None:
    """Print the plan, the `sentences` on why it is that one, what was rejected, and notes."""
    print_plain(plan_line(outcome.plan))
    print_plan(outcome.plan)
    for sentence in sentences or _prediction(costs, outcome):
        print_plain(sentence)
    counts = outcome.considered
    print_plain(
        f"searched in {outcome.plan_time_s:.1f} s: {number_of(counts.groupings, 'grouping')}, "
        f"{number_of(counts.estimated, 'candidate')} estimated, {counts.simulated} simulated"
    )
    for each in outcome.rejected[:_MAX_REJECTED]:
        print_plain(f"rejected: {each.what}: {each.why}")
    for note in notes_on(costs, outcome):
        print_plain(f"note: {note}")
    if out is not None:
        print_plain(f"written: {out}")


def _prediction(costs: WorkloadCosts, outcome: "Outcome") -> tuple[str, ...]:
    """Time and memory of a plan that is too large to be explained beside the search."""
    from zorse_megatron.planner.explain.sentences import bound_sentence

    peaks, capacities = _peaks(outcome), costs.inputs.capacities_bytes
    rank = max(range(len(peaks)), key=lambda each: peaks[each] / capacities[each])
    return (
        f"An iteration takes {outcome.iteration_s:.4g} s: {outcome.tokens_per_s:,.0f} tokens/s, "
        f"{100 * outcome.efficiency:.0f} % of the upper bound.",
        bound_sentence(outcome.bound_s, outcome.recomputing_bound_s, outcome.link_bound),
        f"The fullest GPU is rank {rank} ({costs.inputs.kinds[rank]}): {gib(peaks[rank])} of "
        f"{gib(capacities[rank])} usable.",
    )


def _peaks(outcome: "Outcome") -> tuple[int, ...]:
    predictions = outcome.plan.predictions
    if predictions is not None and predictions.peak_memory_bytes is not None:
        return predictions.peak_memory_bytes
    return outcome.simulation.peak_memory_bytes


def notes_on(costs: WorkloadCosts, outcome: "Outcome") -> list[str]:
    """What was chosen and assumed, each thing once."""
    cannot = not_trainable_yet(outcome.plan)
    extrapolated = "the time was extrapolated from a simulation of fewer samples"
    notes = [
        *([cannot] if cannot else []),
        *([extrapolated] if outcome.extrapolated else []),
        *costs.notes,
        *outcome.notes,
        *build_notes(list(costs.cluster.kinds)),
    ]
    return list(dict.fromkeys(notes))


def answer_as_json(
    costs: WorkloadCosts, outcome: "Outcome", sentences: tuple[str, ...], out: Path | None
) -> dict[str, Any]:
    """Return the same as JSON values."""
    return {
        "ok": True,
        "strategy": outcome.strategy,
        "iteration_s": outcome.iteration_s,
        "tokens_per_s": outcome.tokens_per_s,
        "bound_s": outcome.bound_s,
        "recomputing_bound_s": outcome.recomputing_bound_s,
        "link_bound_s": outcome.link_bound.bound_s,
        "busiest_link": outcome.link_bound.link,
        "efficiency": outcome.efficiency,
        "peak_memory_fraction": outcome.peak_memory_fraction,
        "memory_margin": outcome.margin,
        "dtype": costs.dtype,
        "plan_time_s": outcome.plan_time_s,
        "can_be_trained": not_trainable_yet(outcome.plan) is None,
        "considered": plain(outcome.considered),
        "rejected": plain(outcome.rejected),
        "reasons": list(sentences),
        "notes": notes_on(costs, outcome),
        "plan": plain(outcome.plan),
        "written": None if out is None else str(out),
    }
