"""Plans for a long batch from the search of a shorter one.

A search may simulate so many forwards and backwards in all, and one plan for a long batch takes
most of them. What fills a pipeline and what its stages take is the same for a part of the batch, so
the best plans for the part are simulated with as many times the micro-batches, too.
"""

from collections.abc import Callable
from dataclasses import replace

from zorse_megatron.planner.evaluate.evaluator import Evaluator
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search.zorse import SearchResult
from zorse_megatron.schema.plan.plan import Plan

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
