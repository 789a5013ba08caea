"""Simulate one iteration of a plan with the costs of its search."""

from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedules.communicators import TooManyCommunicators
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.framework import RUNTIME, Framework
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.perturb import Perturbation
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.simulation_errors import SimulationError


def simulate_plan(
    inputs: Inputs,
    plan: Plan,
    *,
    perturbation: Perturbation | None = None,
    framework: Framework = RUNTIME,
    merge_equal_ranks: bool = False,
) -> SimulationResult:
    """See `simulate`, also for what is raised.

    A plan with more communicators than a GPU has room for is one that cannot be executed.
    """
    try:
        fixed_bytes = inputs.fixed_bytes(plan)
    except TooManyCommunicators as error:
        raise SimulationError(str(error)) from error
    return simulate(
        plan,
        inputs.compute,
        inputs.memory,
        inputs.comm,
        inputs.kinds,
        sequence_length=inputs.sequence_length,
        by_dtype=inputs.by_dtype,
        recompute=inputs.recompute,
        fixed_bytes=fixed_bytes,
        perturbation=perturbation,
        framework=framework,
        merge_equal_ranks=merge_equal_ranks,
    )
