"""Why a plan takes as long as it does, what would make it faster, and how sure that is."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.files.wording import memory, percent
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.baselines.lower_bounds import link_bound, lower_bound_s
from zorse_megatron.planner.baselines.stock_best import StockAtBest
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
from zorse_megatron.planner.find_plan import Replans
from zorse_megatron.planner.inputs.search_inputs import Inputs
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
    evaluator = Evaluator(inputs)
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


# How far a predicted iteration may be off, as cost models and simulator were.
#
# Layer times: what nine of ten public measurements were off by at most, for the GPUs' basis
# (docs/simulator.md). The simulation of an iteration from measured layers: the largest error over
# Sailor's runs (docs/simulator.md), 19 with a pipeline and 6 without. The two are taken to be
# independent. No run of this project's own on GPUs is in it.


_PIPELINE, _ONE_GROUP = 0.09, 0.16
_MOST_NAMED = 1


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Of a predicted iteration time."""

    share: float
    """The time is expected within (1 - share, 1 + share) times what is predicted."""
    basis: str
    """For people: what layer times rest on."""

    def between(self, value: float) -> tuple[float, float]:
        """Where a time may lie that is predicted to be `value`."""
        return value * (1 - self.share), value * (1 + self.share)


def error_bar(inputs: Inputs, *, num_groups: int) -> ErrorBar:
    """Return that of a plan on all GPUs, by the kind whose layer times are known worst."""
    layers = max((each.off_by for each in inputs.provenances.values()), default=0.0)
    return ErrorBar(
        share=math.hypot(layers, _PIPELINE if num_groups > 1 else _ONE_GROUP),
        basis=_basis(inputs),
    )


def _basis(inputs: Inputs) -> str:
    by_kind = inputs.provenances
    unknown = [kind for kind, each in by_kind.items() if not each.is_calibrated]
    estimated = [kind for kind, each in by_kind.items() if each.basis == "analytic"]
    if unknown:
        return f"from data sheets, {_named(unknown)} never measured"
    if len(estimated) == len(by_kind):
        return "from published figures"
    if estimated:
        return f"{_named(estimated)} from published figures, others by your profile"
    if any(each.basis == "scaled" for each in by_kind.values()):
        return "scaled from your profile"
    return "calibrated by your profile"


def _named(kinds: list[str]) -> str:
    more = f" and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
    return ", ".join(kinds[:_MOST_NAMED]) + more
