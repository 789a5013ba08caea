"""Choose the groups that send gradients in 16 bits: those that get faster.

Only where the search may (`SearchSpace.gradient_comm_dtype`), as it rounds: see docs/limits.md. It
comes last, group by group, as it changes only how long a reduction is.
"""

from dataclasses import replace

from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts


def with_narrow_gradients(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The plan's evaluation with gradients sent in 16 bits in the groups where that saves time.

    The plan stays as it is where its time was extrapolated: it would have to be simulated in full.
    """
    dtype = evaluator.inputs.space.gradient_comm_dtype
    if dtype is None or best.is_extrapolated:
        return best
    for number, group in enumerate(best.plan.groups):
        if len(group.replicas) == 1 or not holds_equal_parts(group):
            continue
        groups = [*best.plan.groups]
        groups[number] = replace(group, gradient_wire=dtype, hierarchical=None)
        plan: Plan = replace(best.plan, groups=tuple(groups))
        evaluation = evaluator.evaluate_plan(plan)
        if evaluation is not None and evaluation.fits and evaluation.iteration_s < best.iteration_s:
            best = evaluation
    return best
