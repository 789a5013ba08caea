"""Small changes of a plan: what `zorse explain` shows beside it, and where the search ends.

Where one of them is faster and fits, the search takes it and looks again, so that no alternative
that is shown beats the plan that was chosen.
"""

from collections.abc import Iterator
from dataclasses import replace

from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator, computations
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schema.plan.memory_settings import recomputes_anything, without_recompute
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.result import SimulationResult

_MOST_SIMULATED = 24
# Forwards and backwards of a plan beyond which it is left as it is: simulating its changes would
# take longer than the search.
_MOST_COMPUTATIONS = 60_000


def with_changes(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """Take the fastest small change that fits, as long as one is faster: at most 24 simulations.

    A plan whose time was extrapolated stays as it is: it would have to be simulated in full.
    """
    if best.is_extrapolated or computations(best.plan) > _MOST_COMPUTATIONS:
        return best
    inputs, last = evaluator.inputs, evaluator.num_simulated + _MOST_SIMULATED
    while evaluator.num_simulated < last:
        result = best.result or evaluator.simulated(best.plan)
        assert result is not None, "the plan has been simulated before"
        here = replace(best, result=result)
        found = [evaluator.evaluate_plan(other) for _, other in changes(inputs, best.plan, result)]
        fitting = [each for each in found if each is not None and each.fits]
        best = min([here, *fitting], key=lambda each: each.iteration_s)
        if best is here:
            break
    return best


def changes(inputs: Inputs, plan: Plan, result: SimulationResult) -> Iterator[tuple[str, Plan]]:
    """Yield (what, plan): no recomputation, and a layer less in the busiest group.

    `result`: of the plan. What is yielded may break the plan file's rules, or not fit.
    """
    if recomputes_anything(plan) and "none" in inputs.space.recompute:
        yield "no recomputation", without_recompute(plan)
    if len(plan.chunks) != len(plan.groups):
        return
    busiest = busiest_group(plan, result)
    chunks = plan.chunks
    at = next(index for index, chunk in enumerate(chunks) if chunk.group == busiest)
    first, stop = chunks[at].layers
    if stop - first < 2:
        return
    if at > 0:
        cuts = {at - 1: (chunks[at - 1].layers[0], first + 1), at: (first + 1, stop)}
        yield f"one layer from group {busiest} to the one before", _cut(plan, cuts)
    if at + 1 < len(chunks):
        cuts = {at: (first, stop - 1), at + 1: (stop - 1, chunks[at + 1].layers[1])}
        yield f"one layer from group {busiest} to the next one", _cut(plan, cuts)


def busiest_group(plan: Plan, result: SimulationResult) -> int:
    """The group whose ranks compute for the largest part of the iteration."""
    busy = [
        sum(result.usage[rank].busy_s for rank in group.ranks) / len(group.ranks)
        for group in plan.groups
    ]
    return max(range(len(busy)), key=busy.__getitem__)


def _cut(plan: Plan, layers: dict[int, tuple[int, int]]) -> Plan:
    """The plan with other layers in some chunks."""
    chunks = (
        replace(chunk, layers=layers.get(at, chunk.layers)) for at, chunk in enumerate(plan.chunks)
    )
    return replace(plan, chunks=tuple(chunks))
