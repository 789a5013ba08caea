"""Which ranks and steps a figure shows. Without matplotlib."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.spans import spans_of, spell
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.trace import Span

MAX_ROWS = 40
"""More rows than this are too many to read."""


@dataclass(frozen=True, kw_only=True)
class ShownRank:
    """One row of a figure: a rank, and the ranks of its group that look like it."""

    rank: int
    alike: tuple[int, ...]
    group: int

    @property
    def label(self) -> str:
        """`rank 3`, or `ranks 0 to 7, 16 (9 alike)`."""
        if len(self.alike) == 1:
            return f"rank {self.rank}"
        spans = spans_of(self.alike)
        more = " …" if len(spans) > 2 else ""
        return f"ranks {spell(spans[:2])}{more} ({len(self.alike)} alike)"


def rows_of(
    plan: Plan,
    look: Callable[[int], Hashable],
    weight: Callable[[int], float],
    *,
    most: int = MAX_ROWS,
) -> tuple[ShownRank, ...]:
    """One row per rank in model order if they fit; else one per group and look.

    `look`: what ranks that may share a row have in common; `weight`: if there are still too many
    rows, each group keeps those of the highest weight.
    """
    groups = list(dict.fromkeys(chunk.group for chunk in plan.chunks))
    rows = {number: _rows_of_group(plan, number, look, plan.world_size > most) for number in groups}
    kept = max(1, most // len(groups))
    shown = []
    for of_group in rows.values():
        heaviest = sorted(of_group, key=lambda row: (-weight(row.rank), row.rank))
        wanted = of_group if sum(map(len, rows.values())) <= most else heaviest[:kept]
        shown += [row for row in of_group if row in wanted]
    return tuple(shown)


def _rows_of_group(
    plan: Plan, number: int, look: Callable[[int], Hashable], merged: bool
) -> list[ShownRank]:
    ranks: dict[Hashable, list[int]] = {}
    for rank in plan.groups[number].ranks:
        ranks.setdefault(look(rank) if merged else rank, []).append(rank)
    return [ShownRank(rank=alike[0], alike=tuple(alike), group=number) for alike in ranks.values()]


# Which recorded steps are training iterations, and which one of them to show.


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
