"""Simulate a plan for a command, and check that it fits in memory."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import CommandError, gib
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster.cluster import Cluster
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.spans import spans_of, spell

if TYPE_CHECKING:
    from zorse_megatron.simulate.framework import Framework
    from zorse_megatron.simulate.perturb import Perturbation
    from zorse_megatron.simulate.result import SimulationResult

# Beyond these a simulation takes hours or more memory than a workstation has.
MAX_MICRO_BATCHES = 2_000_000
# Up to this many ranks every one is simulated, so that pictures show all of them.
_ALL_RANKS_UP_TO = 64


def simulated(
    plan: Plan,
    costs: WorkloadCosts,
    *,
    source: str,
    perturbation: "Perturbation | None" = None,
    framework: "Framework | None" = None,
) -> "SimulationResult":
    """Simulate one iteration. Raises PlanError or CommandError where that cannot be done.

    `framework`: what trains; None: our runtime.
    """
    from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
    from zorse_megatron.simulate.framework import RUNTIME
    from zorse_megatron.simulate.simulation_errors import SimulationError

    refuse_too_many_micro_batches(plan, source)
    try:
        return simulate_plan(
            costs.inputs,
            plan,
            perturbation=perturbation,
            framework=framework or RUNTIME,
            merge_equal_ranks=plan.world_size > _ALL_RANKS_UP_TO,
        )
    except SimulationError as error:
        problem = Problem(
            where=source,
            found=str(error),
            expected="a plan that can be simulated",
            remedy="Check the plan with zorse check.",
        )
        raise CommandError(f"{source} cannot be simulated", [problem]) from error


def refuse_too_many_micro_batches(plan: Plan, source: str) -> None:
    """Stop where every micro-batch of every chunk would be more than can be listed."""
    count = sum(
        replica.num_microbatches
        for chunk in plan.chunks
        for replica in plan.groups[chunk.group].replicas
    )
    if count <= MAX_MICRO_BATCHES:
        return
    problem = Problem(
        where=f"{source}: groups",
        found=f"{count} micro-batches in all chunks together",
        expected=f"at most {MAX_MICRO_BATCHES}",
        remedy="Use larger micro-batches, or a smaller global batch.",
    )
    raise CommandError(f"{source} is too large to simulate", [problem])


def capacities_bytes(cluster: Cluster, margin: float = 0.0) -> tuple[int, ...]:
    """What each rank's GPU has, but for a share of it."""
    return tuple(int((1 - margin) * cluster.kinds[k].memory_bytes) for k in cluster.gpu_kinds)


def memory_problems(
    plan: Plan, result: "SimulationResult", cluster: Cluster, source: str, *, margin: float = 0.0
) -> Iterator[Problem]:
    """Yield which ranks need more memory than their GPUs have; equal ranks together.

    `margin`: share of each GPU's memory that is to stay free.
    """
    too_much: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    capacities = capacities_bytes(cluster, margin)
    for rank, peak_bytes in enumerate(result.peak_memory_bytes):
        if peak_bytes > capacities[rank]:
            key = plan.group_of_rank(rank), cluster.gpu_kinds[rank], peak_bytes
            too_much[key].append(rank)
    for (group, kind, peak_bytes), ranks in too_much.items():
        capacity = capacities[ranks[0]]
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell(spans_of(ranks))}"
        yield Problem(
            where=f"{source}: groups[{group}], {named}",
            found=f"{gib(peak_bytes)} at the peak",
            expected=f"at most {gib(capacity)}, the memory of {kind}"
            + f" without {100 * margin:g} %" * (margin > 0),
            remedy=f"{gib(peak_bytes - capacity)} too much: give the group fewer layers, "
            "these ranks smaller micro-batches or a smaller shard.",
        )


def types_of(plan: Plan, costs: WorkloadCosts) -> str:
    """What groups compute in, in words."""
    types = (group.compute_dtype or costs.dtype for group in plan.groups)
    return " and ".join(dict.fromkeys(types))


def fullest_rank(result: "SimulationResult", cluster: Cluster) -> tuple[int, float]:
    """The rank whose GPU is filled the most, and the share that is filled."""
    capacities = capacities_bytes(cluster)
    shares = [peak / capacities[rank] for rank, peak in enumerate(result.peak_memory_bytes)]
    rank = max(range(len(shares)), key=shares.__getitem__)
    return rank, shares[rank]
