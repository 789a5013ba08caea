"""What limits a plan, and what would help: the data, and the same in plain words."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.costs.stage_formulas import frozen_bytes
from zorse_megatron.errors import PlanError
from zorse_megatron.files.wording import as_against, duration, figure, memory, number_of, percent
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.baselines.stock_best import StockAtBest
from zorse_megatron.planner.baselines.stock_plans import grid_of_plan
from zorse_megatron.planner.find_plan import Replans
from zorse_megatron.planner.groupings.pools import hardware_key
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace, allows_tp_degree
from zorse_megatron.planner.inputs.tensor_parallel_members import (
    MemberCompute,
    TpGroup,
    with_tp_groups,
)
from zorse_megatron.planner.outcome import LinkBound, members
from zorse_megatron.planner.search.tensor_parallel_choices import tp_shards_to_try
from zorse_megatron.planner.simulate_plan import NodeHostMemory, host_sentences
from zorse_megatron.schedule.actions import TRANSFERS, Kind, parse_action
from zorse_megatron.simulate.result import SimulationResult
from zorse_megatron.simulate.tasks import REPORT

# Why a plan has tensor-parallel groups of a kind of GPU, or none.


_SIZES = (1, 2, 4, 8)
_LINKS = {"pcie": "PCIe", "nvlink": "NVLink", "nvswitch": "NVSwitch"}


@dataclass(frozen=True, kw_only=True)
class PairCosts:
    """A layer of a sample on one GPU, and on a TP group of two like it."""

    kind: str
    link: str
    """What joins them."""
    alone_s: float
    computing_s: float
    collectives_s: float

    @property
    def rate(self) -> float:
        """Throughput of the TP group over that of its GPUs, each by itself."""
        return self.alone_s / (2 * (self.computing_s + self.collectives_s))


def pair_costs(inputs: Inputs) -> list[PairCosts]:
    """Of each kind with two GPUs on a node, each kind of node once, at its best micro-batch."""
    found: dict[object, PairCosts] = {}
    if inputs.tp_costs is None or not allows_tp_degree(inputs, 2):
        return []
    for index, node in enumerate(inputs.spec.nodes):
        for kind, count in Counter(node.gpu_kinds).items():
            key = kind, hardware_key(node)
            if count > 1 and key not in found:
                ranks = [r for r in inputs.spec.ranks_of(index) if inputs.kinds[r] == kind][:2]
                costs = _pair(inputs, (ranks[0], ranks[1]), node.link.type)
                if costs is not None:
                    found[key] = costs
    return list(found.values())


def _pair(inputs: Inputs, ranks: tuple[int, int], link: str) -> PairCosts | None:
    choices = tp_shards_to_try(inputs, ranks)
    if not choices:
        return None
    grouped = with_tp_groups(inputs, (TpGroup(ranks=ranks, tp_shards=choices[0]),))
    compute = grouped.compute
    kind = next(each for each in grouped.kinds if each not in inputs.kinds)
    assert isinstance(compute, MemberCompute)
    sizes = [size for size in _SIZES if size <= inputs.global_batch_size]
    rows = []
    for size in sizes:
        alone = inputs.compute.layer(inputs.kinds[ranks[0]], size)
        inside = compute.collectives(kind, "layer", size)
        computing = compute.without_collectives(kind, size)
        rows.append(
            PairCosts(
                kind=inputs.kinds[ranks[0]],
                link=link,
                alone_s=alone.both_s / size,
                computing_s=computing.both_s / size,
                collectives_s=inside.both_s / size,
            )
        )
    return min(rows, key=lambda row: row.computing_s + row.collectives_s)


def tp_sentences(inputs: Inputs, plan: Plan) -> Iterator[str]:
    """Yield for each kind of GPU why TP is used or not; nothing where it cannot be."""
    used = _kinds_in_tp_groups(inputs, plan)
    if inputs.space.max_tensor_parallel == 1 and not used:
        yield f"TP not used: {_ruled_out(inputs.space)}."
        return
    for costs in pair_costs(inputs):
        over = f"over {_LINKS.get(costs.link, costs.link)}"
        collectives = f"{duration(costs.collectives_s)} of collectives"
        if costs.kind in used:
            degrees = " and ".join(str(degree) for degree in sorted(used[costs.kind]))
            yield (
                f"TP={degrees} used on {costs.kind}: with TP=2 a layer takes "
                f"{duration(costs.computing_s + costs.collectives_s)} per sample instead of "
                f"{duration(costs.alone_s)}, including {collectives} {over}."
            )
            continue
        yield (
            f"TP=2 not used on {costs.kind}: {_slower(costs.rate)} {over} than two GPUs apart "
            f"({collectives} per layer and sample)."
        )


def _ruled_out(space: SearchSpace) -> str:
    if space.barring_tp:
        several = len(space.barring_tp) > 1
        return f"{' and '.join(space.barring_tp)} rule{'' if several else 's'} it out"
    return "--max-tp 1"


def _slower(rate: float) -> str:
    """Compare a TP group with its GPUs apart, by their throughput.

    >>> _slower(0.75), _slower(0.999), _slower(1.02)
    ('25 % slower', 'no faster', '2.0 % faster per layer, not per iteration,')
    """
    if rate > 1.001:
        return f"{percent(rate - 1)} faster per layer, not per iteration,"
    return f"{percent(1 - rate)} slower" if rate < 0.999 else "no faster"


def _kinds_in_tp_groups(inputs: Inputs, plan: Plan) -> dict[str, set[int]]:
    """Kind -> numbers of ranks of the TP groups that it is in."""
    found: dict[str, set[int]] = {}
    for _, _, replica in plan.numbered_replicas():
        for rank in replica.ranks if replica.tp_degree > 1 else ():
            found.setdefault(inputs.kinds[rank], set()).add(replica.tp_degree)
    return found


# Summarize the critical path: where the iteration spends its time.


_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT_GRADIENT: "weight gradients",
    **dict.fromkeys(TRANSFERS, "transfers between groups"),
    Kind.REDUCE_GRAD: "sums of gradients",
    Kind.TIE: "the tied embedding",
    **dict.fromkeys((Kind.SCALE, Kind.NORM), "statistics"),
    Kind.STEP: "optimizer step",
    Kind.UNSHARD: "gathers of parameters",
    **dict.fromkeys(
        (Kind.RESHARD, Kind.OFFLOAD, Kind.FETCH, Kind.OFFLOAD_GRAD),
        "copies to and from the host",
    ),
}
_MAX_LISTED = 4


@dataclass(frozen=True, kw_only=True)
class CriticalShares:
    """Seconds of the critical path, largest first."""

    by_work_s: dict[str, float]
    by_group_s: dict[str, float]
    """By the group's number."""
    contention_s: float
    """Time that transfers and collectives lose to contention for links."""
    num_steps: int


def critical_shares(plan: Plan, result: SimulationResult) -> CriticalShares:
    """Add up the steps of the critical path."""
    by_work_s: Counter[str] = Counter()
    by_group_s: Counter[str] = Counter()
    contention_s = 0.0
    groups = {rank: str(number) for number, each in enumerate(plan.groups) for rank in each.ranks}
    for step in result.critical_path:
        took_s = step.end_s - step.start_s
        by_work_s[_name(step.action)] += took_s  # type: ignore[assignment]
        by_group_s[groups[step.rank]] += took_s  # type: ignore[assignment]
        contention_s += step.contention_s
    return CriticalShares(
        by_work_s=dict(by_work_s.most_common()),
        by_group_s=dict(by_group_s.most_common()),
        contention_s=contention_s,
        num_steps=len(result.critical_path),
    )


def _name(word: str) -> str:
    return _NAMES[Kind.SCALE if word == REPORT else parse_action(word).kind]


def critical_sentences(plan: Plan, shares: CriticalShares, iteration_s: float) -> Iterator[str]:
    """Yield where an iteration spends its time."""
    by_group_s = {plan.group_name(int(each)): s for each, s in shares.by_group_s.items()}
    yield f"Critical path: {_listed(shares.by_work_s, iteration_s)}."
    yield f"Critical path by group: {_listed(by_group_s, iteration_s)}."
    if shares.contention_s > 0.001 * iteration_s:
        yield f"Of which link contention: {percent(shares.contention_s / iteration_s)}."


def _listed(seconds: Mapping[str, float], iteration_s: float) -> str:
    shares = [(name, took_s / iteration_s) for name, took_s in seconds.items()]
    listed = [f"{name} {percent(share)}" for name, share in shares[:_MAX_LISTED] if share > 0.0005]
    return ", ".join(listed)


Limit = Literal["compute", "imbalance and bubbles", "communication"]


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """One rank's memory."""

    rank: int
    kind: str
    capacity_bytes: int
    """What may be filled: the margin is taken off."""
    peak_bytes: int

    @property
    def free_bytes(self) -> int:
        """What is left; below 0 where the plan does not fit."""
        return self.capacity_bytes - self.peak_bytes


@dataclass(frozen=True, kw_only=True)
class GroupLoad:
    """What one group did with its time; shares of the iteration, means over its ranks."""

    group: int
    kinds: tuple[tuple[str, int], ...]
    """(kind, number of GPUs)."""
    num_layers: int
    busy: float
    communication: float
    waiting: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A change of the plan, and what it would do."""

    what: str
    iteration_s: float | None
    """None where it does not fit."""
    why_not: str


@dataclass(frozen=True, kw_only=True)
class AgainstStock:
    """What stock Megatron takes on the same GPUs, or the best of them."""

    even_s: float | None
    """In its best even layout; None: none fits."""
    best_s: float | None
    """In its best layout of all."""
    layout: str | None
    """That one, for people."""
    reason: str
    """Why none fits; empty where one does."""
    lacks: tuple[str, ...]
    """What the plan may do, and no layout of stock."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What limits a plan, and what would help."""

    iteration_s: float
    tokens_per_s: float
    bound_s: float
    """No plan that fits can be faster than this."""
    recomputing_bound_s: float
    """No plan that recomputes every layer can be faster than this."""
    link_bound: LinkBound
    """The same as `bound_s`, counting what must cross the busiest link."""
    efficiency: float
    """bound_s / iteration_s."""
    limited_by: Limit
    bottleneck_group: int
    """The group that is busy for the largest share of the iteration."""
    critical_path: CriticalShares
    loads: tuple[GroupLoad, ...]
    headroom: tuple[Headroom, ...]
    """By rank."""
    host: tuple[NodeHostMemory, ...]
    """Nodes in whose host memory something waits."""
    alternatives: tuple[Alternative, ...]
    replans: Replans | None
    """None: no other search was made."""
    stock: AgainstStock | None = None
    """None: its layouts were not searched."""
    sentences: tuple[str, ...]
    """All of it in plain words."""


# An explanation in plain words.


_FASTER = 1.001


def sentences(inputs: Inputs, plan: Plan, found: Explanation) -> Iterator[str]:
    """Yield all of it in plain words."""
    yield iteration_sentence(found.iteration_s, found.tokens_per_s, found.efficiency)
    yield bound_sentence(found.bound_s, found.recomputing_bound_s, found.link_bound)
    yield from adapter_sentences(inputs)
    if found.stock is not None:
        yield stock_sentence(found.stock, found.iteration_s)
    yield f"Limited by {limit_phrase(inputs, plan, found)}."
    yield from critical_sentences(plan, found.critical_path, found.iteration_s)
    yield f"{fullest_phrase(found.headroom)}."
    yield from host_sentences(found.host)
    yield from tp_sentences(inputs, plan)
    split = [str(number) for number, group in enumerate(plan.groups) if group.split_backward]
    if split:
        yield (
            f"Weight gradients are computed apart from backwards in {_groups(split)}: input "
            "gradients leave sooner, and weight gradients fill idle time. "
            f"{_basis_of_weight_gradients(inputs, plan)}."
        )
    idle = [each.ranks[0] for _, _, each in plan.numbered_replicas() if not each.num_microbatches]
    if idle:
        ranks = ", ".join(map(str, idle[:8]))
        yield f"{len(idle)} GPUs only store state (ranks {ranks})."
    for other in found.alternatives:
        yield f"Alternative, {other.what}: {other.why_not}."
    yield from _replanned(found)


def adapter_sentences(inputs: Inputs) -> Iterator[str]:
    """Say what is trained where that is adapters alone; nothing where all weights are."""
    if inputs.model.lora is None:
        return
    costs, tied = inputs.memory, inputs.tied_embeddings
    frozen = frozen_bytes(costs, inputs.num_layers, True, True, tied_on_same_rank=tied)
    trained = inputs.num_layers * costs.layer_parameters()
    yield (
        f"LoRA ({inputs.model.lora}) trains {trained:,} parameters beside "
        f"{frozen // costs.parameter_bytes(1):,} frozen ones, which take "
        f"{memory(frozen)} and stay whole on the GPUs."
    )


def _basis_of_weight_gradients(inputs: Inputs, plan: Plan) -> str:
    split = {rank for group in plan.groups if group.split_backward for rank in group.ranks}
    kinds = dict.fromkeys(inputs.kinds[rank] for rank in sorted(split))
    known = {kind for kind, each in inputs.provenances.items() if each.has_weight_gradients}
    unknown = [kind for kind in kinds if kind not in known]
    if not unknown:
        return "What they take of a backward is measured"
    return (
        f"What they take of a backward is estimated on {', '.join(unknown)}; zorse profile measure "
        "times it"
    )


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
    yield from one_more_sentences(found.replans)


def one_more_sentences(replans: Replans) -> Iterator[str]:
    """What one more GPU of each kind would bring."""
    for more in replans.one_more:
        gain = f"{duration(more.iteration_s)}, {faster(more.speedup)}"
        brings = gain if more.speedup >= _FASTER else faster(more.speedup)
        yield f"With one more {more.kind} in node {more.node}: {brings}."


def faster(speedup: float) -> str:
    """Say how much faster; less than a thousandth is nothing.

    >>> faster(1.236), faster(1.0002)
    ('24 % faster', 'no faster')
    """
    return f"{percent(speedup - 1)} faster" if speedup >= _FASTER else "no faster"


# A plan beside stock Megatron's best layouts: how much longer these take, and what they lack.


def against_stock(plan: Plan, nodes: Sequence[range], stock: StockAtBest) -> AgainstStock:
    """Compare with what stock takes on the plan's GPUs, or the best of them.

    `nodes`: ranks of each.
    """
    even, best = stock.even.fitting, stock.best.fitting
    return AgainstStock(
        even_s=None if even is None else even.iteration_s,
        best_s=None if best is None else best.iteration_s,
        layout=None if best is None else best.description,
        reason=stock.best.reason,
        lacks=tuple(dict.fromkeys(_lacks(plan, nodes))),
    )


def stock_sentence(found: AgainstStock, iteration_s: float) -> str:
    """Say how long stock takes, and why."""
    if found.best_s is None:
        return f"Stock Megatron has no layout that fits: {found.reason}."
    even = (
        "none fits evenly"
        if found.even_s is None
        else f"{duration(found.even_s)} in its best even one"
    )
    why = "It could run a layout like this plan's"
    if found.lacks:
        *most, last = found.lacks
        why = (
            f"Unlike this plan, it has {' and '.join([', '.join(most), last] if most else [last])}"
        )
    return (
        f"Stock Megatron takes {duration(found.best_s)} in its best layout ({found.layout}), "
        f"{as_against(found.best_s, iteration_s)}, {even}. {why}."
    )


_SAID = {
    "groups": "as many replicas in each stage",
    "micro_batch_size": "one micro-batch size",
    "num_microbatches": "as many micro-batches on each replica",
    "halved": "whole micro-batches",
    "shard_weight": "equal shards",
    "ranks": "one tensor-parallel degree",
    "expert_parallel": "Megatron's own expert parallelism, equal on all ranks",
    "tp_shards": "even TP shards in tensor parallelism",
    "recompute": "one recompute setting",
    "parameters": "parameters on the GPUs alone",
    "gradients": "gradients on the GPUs alone",
    "activations": "activations on the GPUs alone",
    "chunks": "as many virtual stages on each rank",
    "name": "another schedule",
    "split_backward": "backwards in one piece",
    "compute_dtype": "one compute dtype",
}
"""Field of a plan that stock cannot do -> what it has in its place."""


def _lacks(plan: Plan, nodes: Sequence[range]) -> Iterator[str]:
    try:
        grid_of_plan(plan, nodes)
    except PlanError as error:
        for problem in error.problems:
            field = re.sub(r"\[\d+\]", "", problem.where).rpartition(".")[2]
            if field in _SAID and (len(plan.groups) > 1 or field != "name"):
                yield _SAID[field]
