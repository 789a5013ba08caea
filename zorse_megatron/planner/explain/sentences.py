"""An explanation in plain words."""

from collections.abc import Iterator, Sequence

from zorse_megatron.planner.evaluate.node_host_memory import (
    host_sentences,
)
from zorse_megatron.planner.explain.against_stock import stock_sentence
from zorse_megatron.planner.explain.critical_shares import critical_sentences
from zorse_megatron.planner.explain.explanation import Explanation, Headroom
from zorse_megatron.planner.explain.set_sentences import set_sentences
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import LinkBound
from zorse_megatron.planner.plans.describe import members
from zorse_megatron.schema.plan.plan import Plan, Replica
from zorse_megatron.schema.text.counted import number_of
from zorse_megatron.schema.text.figures import duration, figure, memory, percent

_FASTER = 1.001


def sentences(inputs: Inputs, plan: Plan, found: Explanation) -> Iterator[str]:
    """Yield all of it in plain words."""
    yield iteration_sentence(found.iteration_s, found.tokens_per_s, found.efficiency)
    yield bound_sentence(found.bound_s, found.recomputing_bound_s, found.link_bound)
    if found.stock is not None:
        yield stock_sentence(found.stock, found.iteration_s)
    yield f"Limited by {limit_phrase(inputs, plan, found)}."
    yield from critical_sentences(plan, found.critical_path, found.iteration_s)
    yield f"{fullest_phrase(found.headroom)}."
    yield from host_sentences(found.host)
    yield from set_sentences(inputs, plan)
    split = [str(number) for number, group in enumerate(plan.groups) if group.split_backward]
    if split:
        yield (
            f"Weight gradients are computed apart from backwards in {_groups(split)}: input "
            "gradients leave sooner, and weight gradients fill idle time."
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


def iteration_sentence(iteration_s: float, tokens_per_s: float, efficiency: float) -> str:
    """State the prediction."""
    return (
        f"An iteration takes {duration(iteration_s)}: {figure(tokens_per_s)} tokens/s, "
        f"{percent(efficiency)} of the upper bound."
    )


def bound_sentence(bound_s: float, recomputing_bound_s: float, links: LinkBound) -> str:
    """State the lower bounds that no plan can beat."""
    work = (
        f"No plan can take less than {duration(bound_s)} (all GPUs computing all the time), or "
        f"{duration(recomputing_bound_s)} if it recomputes every layer."
    )
    if links.link is None:
        return work
    return f"{work} Traffic over {links.link} raises that to {duration(links.bound_s)}."


def limit_phrase(inputs: Inputs, plan: Plan, found: Explanation) -> str:
    """Say what limits a plan, and which group is busiest."""
    load = found.loads[found.bottleneck_group]
    gpus = members(plan.groups[found.bottleneck_group], inputs.kinds)
    return (
        f"{found.limited_by}: group {load.group} ({gpus}, "
        f"{number_of(load.num_layers, 'layer')}) computes {percent(load.busy)} of the time"
    )


def fullest_phrase(headroom: Sequence[Headroom]) -> str:
    """Say which GPU has least memory left."""
    tightest = min(headroom, key=lambda each: each.free_bytes)
    free = memory(abs(tightest.free_bytes))
    left = f"{free} free" if tightest.free_bytes >= 0 else f"{free} too little"
    return (
        f"Fullest GPU: rank {tightest.rank} ({tightest.kind}), {left} of "
        f"{memory(tightest.capacity_bytes)} usable"
    )


def _replanned(found: Explanation) -> Iterator[str]:
    if found.replans is None:
        return
    again_s = found.replans.again_s
    if again_s < 0.995 * found.iteration_s:
        yield (
            f"A new search finds {duration(again_s)} on the same GPUs: "
            f"{percent(found.iteration_s / again_s - 1)} faster than this plan."
        )
    for more in found.replans.one_more:
        gain = f"{duration(more.iteration_s)}, {faster(more.speedup)}"
        brings = gain if more.speedup >= _FASTER else faster(more.speedup)
        yield f"With one more {more.kind} in node {more.node}: {brings}."


def faster(speedup: float) -> str:
    """Say how much faster; less than a thousandth is nothing.

    >>> faster(1.236), faster(1.0002)
    ('24 % faster', 'no faster')
    """
    return f"{percent(speedup - 1)} faster" if speedup >= _FASTER else "no faster"


def _only_holds(replica: Replica) -> bool:
    return replica.num_microbatches == 0
