"""An explanation in plain words."""

from collections.abc import Iterator

from zorse_megatron.planner.evaluate.node_host_memory import (
    host_sentences,
)
from zorse_megatron.planner.explain.explanation import Explanation
from zorse_megatron.planner.explain.set_sentences import set_sentences
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import LinkBound
from zorse_megatron.planner.plans.describe import members
from zorse_megatron.schema.plan.plan import Plan, Replica
from zorse_megatron.schema.text.counted import number_of

_GIB = 2**30
_FASTER = 1.001


def sentences(inputs: Inputs, plan: Plan, found: Explanation) -> Iterator[str]:
    """Yield all of it in plain words."""
    yield (
        f"An iteration takes {found.iteration_s:.3f} s: {found.tokens_per_s:,.0f} tokens/s, "
        f"{100 * found.efficiency:.0f} % of the upper bound."
    )
    yield bound_sentence(found.bound_s, found.recomputing_bound_s, found.link_bound)
    load = found.loads[found.bottleneck_group]
    group = plan.groups[found.bottleneck_group]
    yield (
        f"Limited by {found.limited_by}: group {load.group} ({members(group, inputs.kinds)}) "
        f"computes {100 * load.busy:.0f} % of the time, with {number_of(load.num_layers, 'layer')}."
    )
    told = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.critical_path[:4])
    yield f"Critical path: {told}."
    tightest = min(found.headroom, key=lambda each: each.free_bytes)
    yield (
        f"Tightest memory: rank {tightest.rank} ({tightest.kind}) has "
        f"{tightest.free_bytes / _GIB:.2f} of {tightest.capacity_bytes / _GIB:.2f} GiB free."
    )
    yield from host_sentences(found.host)
    yield from set_sentences(inputs, plan)
    split = [str(number) for number, group in enumerate(plan.groups) if group.split_backward]
    if split:
        yield (
            f"Weight gradients are computed apart from backwards in {_groups(split)}: gradients "
            "of inputs leave sooner, and weight gradients wait in memory for idle time."
        )
    idle = [replica for each in plan.groups for replica in each.replicas if _only_holds(replica)]
    if idle:
        ranks = ", ".join(str(replica.ranks[0]) for replica in idle[:8])
        yield f"{len(idle)} GPUs only store state (ranks {ranks})."
    for other in found.alternatives:
        yield f"Alternative, {other.what}: {other.why_not}."
    yield from _replanned(found)


def _groups(numbers: list[str]) -> str:
    return f"group {numbers[0]}" if len(numbers) == 1 else f"groups {', '.join(numbers)}"


def bound_sentence(bound_s: float, recomputing_bound_s: float, links: LinkBound) -> str:
    """State the lower bounds that no plan can beat."""
    work = (
        f"Lower bound of any plan: {bound_s:.3f} s; with every layer recomputed, "
        f"{recomputing_bound_s:.3f} s (all GPUs at full speed, no waiting)."
    )
    if links.link is None:
        return work
    return f"{work} With what must cross {links.link}: {links.bound_s:.3f} s."


def _replanned(found: Explanation) -> Iterator[str]:
    if found.replans is None:
        return
    again_s = found.replans.again_s
    if again_s < 0.995 * found.iteration_s:
        yield (
            f"A new search finds {again_s:.3f} s on the same GPUs: "
            f"{100 * (found.iteration_s / again_s - 1):.1f} % faster than this plan."
        )
    for more in found.replans.one_more:
        gain = f"{more.iteration_s:.3f} s, {faster(more.speedup)}"
        told = gain if more.speedup >= _FASTER else faster(more.speedup)
        yield f"With one more {more.kind} in node {more.node}: {told}."


def faster(speedup: float) -> str:
    """Say how much faster; less than a thousandth is nothing.

    >>> faster(1.236), faster(1.0002)
    ('23.6 % faster', 'no faster')
    """
    return f"{100 * (speedup - 1):.1f} % faster" if speedup >= _FASTER else "no faster"


def _only_holds(replica: Replica) -> bool:
    return replica.num_microbatches == 0
