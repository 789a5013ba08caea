"""Choose the groups that send gradients in 16 bits: those that get faster.

Only where the search may (`SearchSpace.gradient_wire`), as it rounds: see docs/limits.md. It comes
last, group by group, as it changes only how long a reduction is.
"""

from dataclasses import replace

from zorse_megatron.planner.evaluate.evaluator import Judge, Verdict
from zorse_megatron.schema.plan.plan import Plan


def with_narrow_wire(judge: Judge, best: Verdict) -> Verdict:
    """The verdict on the plan with a narrow wire in the groups where that saves time.

    The plan stays as it is where its time was extrapolated: it would have to be played in full.
    """
    wire = judge.inputs.space.gradient_wire
    if wire is None or best.is_extrapolated:
        return best
    for number, group in enumerate(best.plan.groups):
        if len(group.replicas) == 1:
            continue
        groups = [*best.plan.groups]
        groups[number] = replace(group, gradient_wire=wire)
        plan: Plan = replace(best.plan, groups=tuple(groups))
        verdict = judge.judge_plan(plan)
        if verdict is not None and verdict.fits and verdict.iteration_s < best.iteration_s:
            best = verdict
    return best
