"""Spans of a plan's action lists, as if every action took a millisecond and nothing waited long."""

from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import COMPUTE
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.trace import Span

ACTION_S = 0.001


def fake_spans(plan: Plan, *, step: int = 0, action_s: float = ACTION_S) -> dict[int, list[Span]]:
    """Rank -> one span per action; a computation waits for the first half of its span."""
    start_s = 1000.0 * (step + 1)
    return {
        rank: [
            Span(
                step=step,
                action=str(action),
                start_s=start_s + number * action_s,
                end_s=start_s + (number + 1) * action_s,
                waited_s=action_s / 2 if action.kind in COMPUTE else 0.0,
            )
            for number, action in enumerate(actions)
        ]
        for rank, actions in enumerate(lower_plan(plan).ranks)
    }
