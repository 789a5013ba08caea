"""Simulate one iteration of a plan with the costs of its search."""

from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedules.actions import ActionLists
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.simulate.framework import RUNTIME, Framework
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.micro_batch_times import micro_batch_times
from zorse_megatron.simulate.perturb import Perturbation
from zorse_megatron.simulate.result import SimulationResult


def has_sets(plan: Plan) -> bool:
    """Whether any replica has several ranks."""
    return any(len(replica.ranks) > 1 for group in plan.groups for replica in group.replicas)


def simulate_plan(
    inputs: Inputs,
    plan: Plan,
    *,
    perturbation: Perturbation | None = None,
    framework: Framework = RUNTIME,
    merge_equal_ranks: bool = False,
    lists: ActionLists | None = None,
) -> SimulationResult:
    """See `simulate`, also for what is raised."""
    return simulate(
        plan,
        inputs.compute,
        inputs.memory,
        inputs.comm,
        inputs.kinds,
        sequence_length=inputs.sequence_length,
        by_dtype=inputs.by_dtype,
        recompute=inputs.recompute,
        fixed_bytes=inputs.fixed_bytes(plan),
        perturbation=perturbation,
        framework=framework,
        merge_equal_ranks=merge_equal_ranks,
        lists=lists,
        sets=inputs.sets if has_sets(plan) else None,
    )


def planned_micro_batch_times(inputs: Inputs, plan: Plan) -> tuple[float, ...]:
    """See `micro_batch_times`."""
    return micro_batch_times(
        plan,
        inputs.compute,
        inputs.memory,
        inputs.comm,
        inputs.kinds,
        sequence_length=inputs.sequence_length,
        by_dtype=inputs.by_dtype or {},
        recompute=inputs.recompute,
        sets=inputs.sets if has_sets(plan) else None,
    )
