"""Last choices for a plan: two levels, 16-bit gradients, split backwards, long batches.

Only where the search may (`SearchSpace.split_backward`). It comes last, for the fastest plans of
the search: what it saves is a part of their fill/drain bubble, so that a plan which was not the
fastest may become it. A group is split where the memory allows it and the plan gets faster; with
little memory, so that one micro-batch of each replica waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

from zorse_megatron.plan.plan import Plan, has_equal_tp_shards
from zorse_megatron.planner.closed_form.communication import in_two_levels
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search.zorse_search import SearchResult
from zorse_megatron.schedule.pipeline_schedules import round_of

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
            delayed_wgrad_samples=round_of(group) if way is Way.ONE_ROUND else None,
        )
        for group, way in zip(plan.groups, ways, strict=True)
    )
    return replace(plan, groups=tuple(groups))


# Choose the groups that sum and gather in two levels, of those with ranks in several regions.
#
# Plans of the search do where the closed form has it faster for a layer's gradients alone
# (`planner.closed_form.communication`). What a plan gains depends on what hides behind computation,
# and on links that others use, so the fastest plan is simulated with each such group the other way,
# too.


def with_best_levels(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The plan's evaluation with each group of several regions in two levels, or in a ring.

    The plan stays as it is where its time was extrapolated: it would have to be simulated in full.
    """
    if not evaluator.inputs.space.hierarchical or best.is_extrapolated:
        return best
    for number, group in enumerate(best.plan.groups):
        if len({replica.region for replica in group.replicas}) == 1:
            continue
        groups = [*best.plan.groups]
        groups[number] = replace(group, hierarchical=None)
        other = replace(best.plan, groups=tuple(groups))
        if not group.hierarchical:
            other = in_two_levels(other, [number])
        evaluation = None if other == best.plan else evaluator.evaluate_plan(other)
        if evaluation is not None and evaluation.fits and evaluation.iteration_s < best.iteration_s:
            best = evaluation
    return best


# Choose the groups that send gradients in 16 bits: those that get faster.
#
# Only where the search may (`SearchSpace.grad_reduce_dtype`), as it rounds: see docs/limits.md.
# It comes last, group by group, as it changes only how long a reduction is.


def with_narrow_gradients(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The plan's evaluation with gradients sent in 16 bits in the groups where that saves time.

    The plan stays as it is where its time was extrapolated: it would have to be simulated in full.
    """
    dtype = evaluator.inputs.space.grad_reduce_dtype
    if dtype is None or best.is_extrapolated:
        return best
    for number, group in enumerate(best.plan.groups):
        if len(group.replicas) == 1 or not has_equal_tp_shards(group):
            continue
        groups = [*best.plan.groups]
        groups[number] = replace(group, grad_reduce_dtype=dtype, hierarchical=None)
        plan: Plan = replace(best.plan, groups=tuple(groups))
        evaluation = evaluator.evaluate_plan(plan)
        if evaluation is not None and evaluation.fits and evaluation.iteration_s < best.iteration_s:
            best = evaluation
    return best


# Plans for a long batch from the search of a shorter one.
#
# A search may simulate so many forwards and backwards in all, and one plan for a long batch takes
# most of them. What fills a pipeline and what its stages take is the same for a part of the batch,
# so the best plans for the part are simulated with as many times the micro-batches, too.


_LONG = 2048
"""Samples beyond which a search sees few plans."""
_MOST_GPUS = 256
"""Searches of more GPUs see few plans anyway, and take long."""
_TRIED = 4


def with_plans_of_shorter(
    found: SearchResult,
    evaluator: Evaluator,
    search: Callable[[Inputs], SearchResult],
) -> SearchResult:
    """Add to a search's result what comes of a part of the batch, if it is a long one.

    `evaluator`: of the whole batch; `search`: finds plans for other inputs.
    """
    inputs = evaluator.inputs
    times = shortened_by(inputs)
    if times == 1:
        return found
    part = search(replace(inputs, global_batch_size=inputs.global_batch_size // times))
    plans = [lengthened(each.plan, times) for each in part.evaluations[:_TRIED]]
    evaluations = [each for plan in plans if (each := evaluator.evaluate_plan(plan)) is not None]
    lengthened_ones = SearchResult(
        evaluations=[each for each in evaluations if each.fits],
        considered=part.considered + SearchStats(simulated=len(plans)),
    )
    return found + lengthened_ones


def shortened_by(inputs: Inputs) -> int:
    """What a batch is divided by; 1: it is short enough, or there is no such number."""
    samples = inputs.global_batch_size
    if samples <= _LONG or inputs.world_size > _MOST_GPUS:
        return 1
    least = -(-samples // _LONG)
    divisors = (times for times in range(least, 4 * least) if samples % times == 0)
    return next(divisors, 1)


def lengthened(plan: Plan, times: int) -> Plan:
    """The plan with so many times the micro-batches."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                replace(replica, num_microbatches=times * replica.num_microbatches)
                for replica in group.replicas
            ),
        )
        for group in plan.groups
    )
    return replace(
        plan, groups=groups, global_batch_size=times * plan.global_batch_size, predictions=None
    )
