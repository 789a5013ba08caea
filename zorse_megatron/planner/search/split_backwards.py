"""Choose the groups that compute weight gradients apart from backwards.

Only where the search may (`SearchSpace.split_backward`). It comes last, for the fastest plans of
the search: what it saves is a part of their fill/drain bubble, so that a plan which was not the
fastest may become it. A group is split where the memory allows it and the plan gets faster.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator
from zorse_megatron.schema.plan.plan import Plan

_FINALISTS = 4
_MOST_BEHIND = 1.05
"""A plan that is slower by more than that is not tried: on the example clusters it saves 4 %."""
_LEAST_GAIN = 0.999
"""What a group must bring, in parts of the iteration: each costs memory."""


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
    """Split all groups that have room, then one more or less at a time."""
    first = plain.plan.chunks[0].group  # nobody waits for its gradients of inputs
    wanted = set(range(len(plain.plan.groups))) - {first}
    best, chosen = plain, set[int]()
    while wanted:
        all_of_them = evaluator.evaluate_plan(splitting(plain.plan, wanted))
        if all_of_them is None:
            return plain
        if all_of_them.fits:
            if all_of_them.iteration_s < _LEAST_GAIN * plain.iteration_s:
                best, chosen = all_of_them, set(wanted)
            break
        overflow = all_of_them.overflow_bytes
        full = {number for number in wanted if overflow[number] > 0}
        wanted -= full or {max(wanted, key=lambda number: overflow[number])}
    for number in reversed(range(len(plain.plan.groups))):
        other = chosen ^ {number}
        found = evaluator.evaluate_plan(splitting(plain.plan, other))
        if found is None or not found.fits:
            continue
        # One that is taken away may cost as little as one that is added must bring.
        adds = number in other
        if found.iteration_s < best.iteration_s * (_LEAST_GAIN if adds else 2 - _LEAST_GAIN):
            best, chosen = found, other
    return best


def splitting(plan: Plan, numbers: Collection[int]) -> Plan:
    """The plan with `split_backward` in these groups."""
    groups = (
        replace(group, split_backward=True if number in numbers else None)
        for number, group in enumerate(plan.groups)
    )
    return replace(plan, groups=tuple(groups))
