"""Why a plan takes as long as it does, and what would make it faster."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zorse_megatron.files.wording import memory, percent
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.baselines.lower_bounds import link_bound, lower_bound_s
from zorse_megatron.planner.baselines.stock_best import StockAtBest
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluator
from zorse_megatron.planner.explanation import (
    Alternative,
    CriticalShares,
    Explanation,
    GroupLoad,
    Headroom,
    Limit,
    against_stock,
    critical_shares,
    sentences,
)
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.other_searches import Replans
from zorse_megatron.planner.search.local_moves import busiest_group, changes
from zorse_megatron.planner.simulate_plan import host_needs, simulate_plan
from zorse_megatron.simulate.result import SimulationResult


def explain(
    inputs: Inputs,
    plan: Plan,
    replans: Replans | None = None,
    stock: StockAtBest | None = None,
    result: SimulationResult | None = None,
) -> Explanation:
    """Explain a plan on the cluster of `inputs`.

    The plan is simulated, and so are its alternatives (`changes`): no recomputation, a layer moved
    away from the busiest group. `replans`: see `replan`; `stock`: on the plan's GPUs; `result`: of
    the plan's simulation, if there was one. Raises PlanError or SimulationError where it cannot be
    simulated, ValueError where the plan is for another number of GPUs.
    """
    if plan.world_size != inputs.world_size:
        raise ValueError(
            f"found a plan for {plan.world_size} GPUs and a cluster of {inputs.world_size}; "
            "expected as many of both. Plan again for this cluster."
        )
    result = result or simulate_plan(inputs, plan, merge_equal_ranks=True)
    loads = tuple(_loads(inputs, plan, result))
    path = critical_shares(plan, result)
    bottleneck = busiest_group(plan, result)
    # Bounds are of plans whose groups compute and send gradients in this one's types.
    types = sorted({group.compute_dtype for group in plan.groups if group.compute_dtype})
    narrow = any(group.grad_reduce_dtype for group in plan.groups)
    bound_s = lower_bound_s(inputs, dtypes=types)
    nodes = [inputs.spec.ranks_of(node) for node in range(len(inputs.spec.nodes))]
    unworded = Explanation(
        iteration_s=result.iteration_s,
        tokens_per_s=result.tokens_per_s,
        bound_s=bound_s,
        recomputing_bound_s=lower_bound_s(inputs, recomputing=True, dtypes=types),
        link_bound=link_bound(inputs, dtypes=types, narrow_gradients=narrow),
        efficiency=bound_s / result.iteration_s,
        limited_by=_limit(loads, path, result.iteration_s),
        bottleneck_group=bottleneck,
        critical_path=path,
        loads=loads,
        headroom=_headroom(inputs, result),
        host=host_needs(inputs, result),
        alternatives=tuple(_alternatives(inputs, plan, result)),
        replans=replans,
        stock=None if stock is None else against_stock(plan, nodes, stock),
        sentences=(),
    )
    return replace(unworded, sentences=tuple(sentences(inputs, plan, unworded)))


def _loads(inputs: Inputs, plan: Plan, result: SimulationResult) -> Iterator[GroupLoad]:
    for number, group in enumerate(plan.groups):
        usage = [result.usage[rank] for rank in group.ranks]
        whole_s = len(usage) * result.iteration_s
        counts = Counter(inputs.kinds[rank] for rank in group.ranks)
        yield GroupLoad(
            group=number,
            kinds=tuple(sorted(counts.items())),
            num_layers=plan.num_layers_of_group(number),
            busy=sum(each.busy_s for each in usage) / whole_s,
            communication=sum(each.communication_s for each in usage) / whole_s,
            waiting=sum(each.wait_s + each.idle_s for each in usage) / whole_s,
        )


def _limit(loads: Sequence[GroupLoad], path: CriticalShares, iteration_s: float) -> Limit:
    """Compute where the busiest group hardly ever waits; else what it waits for."""
    if max(load.busy for load in loads) >= 0.85:
        return "compute"
    computing = {"forward", "backward", "weight gradients", "optimizer step"}
    other_s = sum(took_s for name, took_s in path.by_work_s.items() if name not in computing)
    return "communication" if other_s > 0.15 * iteration_s else "imbalance and bubbles"


def _headroom(inputs: Inputs, result: SimulationResult) -> tuple[Headroom, ...]:
    return tuple(
        Headroom(rank=rank, kind=inputs.kinds[rank], capacity_bytes=capacity, peak_bytes=peak)
        for rank, (capacity, peak) in enumerate(
            zip(inputs.capacities_bytes, result.peak_memory_bytes, strict=True)
        )
    )


def _alternatives(inputs: Inputs, plan: Plan, result: SimulationResult) -> Iterator[Alternative]:
    evaluator = Evaluator(inputs, Estimator(inputs))
    for what, other in changes(inputs, plan, result):
        found = evaluator.evaluate_plan(other)
        if found is None:
            continue
        overflow = max(found.overflow_bytes)
        missing = [need for need in found.host if need.missing_bytes]
        change = found.iteration_s / result.iteration_s - 1
        if overflow > 0:
            why = f"{memory(overflow)} too much on one GPU"
        elif missing:
            why = f"{memory(missing[0].missing_bytes)} too much in the host memory of a node"
        else:
            why = f"{percent(abs(change))} {'slower' if change > 0 else 'faster'}"
        iteration_s = found.iteration_s if found.fits else None
        yield Alternative(what=what, iteration_s=iteration_s, why_not=why)
