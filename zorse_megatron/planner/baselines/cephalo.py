"""Baseline `cephalo`: one group of all GPUs, as Cephalo trains (ICS 2025), on our cost models.

Uneven micro-batch sizes and counts, training state sharded by free memory, layered accumulation:
every layer is gathered once per pass, runs all micro-batches, and is reduced. Every layer is
recomputed; what is kept waits in the host only where it does not fit.
"""

from dataclasses import replace

from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.device_groups import DeviceGroups
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate.evaluator import Evaluation, Evaluator, best_first
from zorse_megatron.planner.inputs.search_inputs import Inputs

_LEVELS = (1, 2, 4, 8)
_LAYERS_PER_CHUNK = (1, 2, 4)
_SIMULATED = 3


def cephalo_plans(
    inputs: Inputs, evaluator: Evaluator, device_groups: DeviceGroups
) -> list[Evaluation]:
    """Evaluations of the best plans that fit, fastest first."""
    world = device_groups.of(tuple(range(inputs.world_size)))
    found: list[Estimate] = []
    for layers in _LAYERS_PER_CHUNK:
        for level in _LEVELS:
            candidate = Candidate(
                device_groups=(world,),
                levels=(min(level, inputs.global_batch_size),),
                schedule="breadth_first",
                num_chunks=-(-inputs.num_layers // layers),
                origin="together",
            )
            found += evaluator.estimator.best(candidate)
    evaluations: list[Evaluation] = []
    for estimate in sorted(found, key=lambda each: each.iteration_s):
        evaluation = _fitted(evaluator, estimate)
        if evaluation is not None:
            evaluations.append(evaluation)
            if len(evaluations) == _SIMULATED:
                break
    return best_first(evaluations)


def cephalo_inputs(inputs: Inputs) -> Inputs:
    """The same with its search space: it always recomputes every layer."""
    return replace(inputs, space=replace(inputs.space, recompute=("full",)))


def _fitted(evaluator: Evaluator, estimate: Estimate) -> Evaluation | None:
    """Simulate; once more with what was missing kept free."""
    for _ in range(3):
        evaluation = evaluator.evaluate(estimate)
        if evaluation is not None and evaluation.fits:
            return evaluation
        missing = max(evaluation.overflow_bytes) if evaluation is not None else 0
        more = _with_reserve(evaluator.estimator, estimate, missing)
        if more is None:
            return None
        estimate = more
    return None


def _with_reserve(estimator: Estimator, estimate: Estimate, missing: int) -> Estimate | None:
    before = (estimate.candidate.reserves or (0,))[0]
    reserve = before + missing + min(estimator.inputs.capacities_bytes) // 200
    candidate = replace(estimate.candidate, reserves=(reserve,))
    return estimator.estimate(candidate, estimate.layers)
