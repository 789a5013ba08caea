"""Which recorded steps are training iterations, and which one of them to show."""

from collections.abc import Mapping, Sequence

from zorse_megatron.schedules.actions import Kind
from zorse_megatron.trace import Span

Traces = Mapping[int, Sequence[Span]]
"""Rank -> its spans."""


def training_steps(traces: Traces) -> list[int]:
    """Numbers of the recorded steps with an optimizer step, on every rank; evaluations have none.

    The first of them is the run's first recorded iteration, and so on.
    """
    stepped = [
        {span.step for span in spans if span.action == Kind.NORM} for spans in traces.values()
    ]
    return sorted(set.intersection(*stepped)) if stepped else []


def spans_of_step(traces: Traces, step: int) -> dict[int, tuple[Span, ...]]:
    """Only the spans of one step."""
    return {
        rank: tuple(span for span in spans if span.step == step) for rank, spans in traces.items()
    }


def duration_s(traces: Traces, step: int) -> float:
    """From the first start to the last end of a step, over all ranks."""
    spans = [span for of_rank in spans_of_step(traces, step).values() for span in of_rank]
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def fastest_step(traces: Traces) -> int:
    """The training step with the shortest duration, in which the machine disturbed least."""
    steps = training_steps(traces)
    if not steps:
        raise ValueError("found no training step that all ranks recorded; expected one at least")
    return min(steps, key=lambda step: duration_s(traces, step))
