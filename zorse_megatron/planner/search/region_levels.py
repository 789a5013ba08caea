"""Choose the groups that sum and gather in two levels, of those with ranks in several regions.

Plans of the search do where the closed form has it faster for a layer's gradients alone
(`closed_form.communication`). What a plan gains depends on what hides behind computation, and on
links that others use, so the fastest plan is simulated with each such group the other way, too.
"""

from dataclasses import replace

from zorse_megatron.planner.closed_form.two_levels import in_two_levels
from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator


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
