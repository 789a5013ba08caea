"""Last choices for a plan: two levels, 16-bit gradients, long batches."""

from collections.abc import Callable
from dataclasses import replace

from zorse_megatron.plan.plan import Plan, has_equal_tp_shards
from zorse_megatron.planner.closed_form.communication import in_two_levels
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import SearchStats
from zorse_megatron.planner.search.zorse_search import SearchResult

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
        other = best.plan.with_group(number, hierarchical=None)
        if not group.hierarchical:
            other = in_two_levels(other, [number])
        if other != best.plan:
            best = evaluator.faster(best, other)
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
        other = best.plan.with_group(number, grad_reduce_dtype=dtype, hierarchical=None)
        best = evaluator.faster(best, other)
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
    blocks = samples // inputs.space.sample_block
    divisors = (times for times in range(least, 4 * least) if blocks % times == 0)
    return next(divisors, 1)


def lengthened(plan: Plan, times: int) -> Plan:
    """The plan with so many times the micro-batches."""
    longer = (
        replace(replica, num_microbatches=times * replica.num_microbatches)
        for _, _, replica in plan.numbered_replicas()
    )
    batch = times * plan.global_batch_size
    return replace(plan.with_replicas(longer), global_batch_size=batch, predictions=None)
