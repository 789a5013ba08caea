"""Choose the groups that compute weight gradients apart from backwards.

Only where the search may (`SearchSpace.split_backward`). It comes last, for the fastest plans of
the search: what it saves is a part of their fill/drain bubble, so that a plan which was not the
fastest may become it. A group is split where the memory allows it and the plan gets faster; with
little memory, so that one micro-batch of each replica waits.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator
from zorse_megatron.schedules.one_f_one_b import round_of
from zorse_megatron.schema.plan.plan import Plan

_FINALISTS = 4
_MOST_BEHIND = 1.05
"""A plan that is slower by more than that is not tried: on the example clusters it saves 4 %."""
_LEAST_GAIN = 0.999
"""What a group must bring, in parts of the iteration: each costs memory."""


class Way(IntEnum):
    """How many micro-batches of a replica have weight gradients that wait."""

    PLAIN = 0
    """None: backwards compute them."""
    ONE_ROUND = 1
    """One."""
    FULL = 2
    """As many as the schedule has use for."""


def with_split_backwards(evaluator: Evaluator, found: Sequence[Evaluation]) -> Evaluation:
    """The fastest of the first plans of the search, each with the groups split that make it faster.

    `found`: fastest first. O(groups) simulations for each plan. Plans whose time was extrapolated
    stay as they are: they would have to be simulated in full.
    """
    best = found[0]
    if not evaluator.inputs.space.split_backward:
        return best
    limit_s = _MOST_BEHIND * best.iteration_s
    for one in found[:_FINALISTS]:
        if one.iteration_s <= limit_s and not one.is_extrapolated and len(one.plan.groups) > 1:
            best = min(best, _split(evaluator, one), key=lambda each: each.iteration_s)
    return best


def _split(evaluator: Evaluator, plain: Evaluation) -> Evaluation:
    """Split as much as there is room for, then change one group at a time."""
    groups = plain.plan.groups
    first = plain.plan.chunks[0].group  # nobody waits for its gradients of inputs
    ways = [Way.PLAIN if number == first else Way.FULL for number in range(len(groups))]
    best, chosen = plain, [Way.PLAIN] * len(groups)
    while any(ways):
        found = evaluator.evaluate_plan(splitting(plain.plan, ways))
        if found is None:
            return plain
        if found.fits:
            if found.iteration_s < _LEAST_GAIN * plain.iteration_s:
                best, chosen = found, ways
            break
        over = found.overflow_bytes
        fullest = max((n for n, way in enumerate(ways) if way), key=lambda n: over[n])
        ways = [
            Way(way - 1) if way and (over[number] > 0 or number == fullest) else way
            for number, way in enumerate(ways)
        ]
    for number in reversed(range(len(groups))):
        for way in Way:
            other = [*chosen[:number], way, *chosen[number + 1 :]]
            found = (
                None if other == chosen else evaluator.evaluate_plan(splitting(plain.plan, other))
            )
            if found is None or not found.fits:
                continue
            # What is taken away may cost as little as what is added must bring.
            limit = _LEAST_GAIN if way > chosen[number] else 2 - _LEAST_GAIN
            if found.iteration_s < limit * best.iteration_s:
                best, chosen = found, other
    return best


def splitting(plan: Plan, ways: Sequence[Way]) -> Plan:
    """The plan, of which each group is split in its way."""
    groups = (
        replace(
            group,
            split_backward=True if way else None,
            delayed_samples=round_of(group) if way is Way.ONE_ROUND else None,
        )
        for group, way in zip(plan.groups, ways, strict=True)
    )
    return replace(plan, groups=tuple(groups))
