"""Reads a plan as a layout of stock Megatron, and says the flags that start it.

What unmodified Megatron cannot do is refused, all of it at once; nothing that a plan says is
dropped in silence, but for names and predictions.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from zorse_megatron.errors import PlanError, Problem
from zorse_megatron.plan.memory_settings import said_settings
from zorse_megatron.plan.plan import Plan, Recompute, Replica
from zorse_megatron.plan.rules import STOCK_EXPERT_PARALLEL
from zorse_megatron.plan.spans import spans_of, spell
from zorse_megatron.planner.baselines.stock_layouts import REPLICATED, STOCK_OPTIMIZER, Grid
from zorse_megatron.planner.inputs.search_inputs import Inputs

_OWN_RUNTIME = "Train with the plan (zorse launch without --stock), or make a plan for stock: zorse"
_REMEDY = f"{_OWN_RUNTIME} plan --strategy stock."
_NOTHING = Recompute(mode="none")


def grid_of_plan(
    plan: Plan, nodes: Sequence[range], source: str = "plan"
) -> tuple[Grid, tuple[int, ...]]:
    """Return the layout, and rank of stock's job -> rank of the plan.

    `nodes`: ranks of each node of the cluster. Raises PlanError with every reason why unmodified
    Megatron cannot run the plan.
    """
    stages = plan.groups_in_order
    order = tuple(
        rank
        for group in stages
        for replica in plan.groups[group].replicas
        for rank in replica.ranks
    )
    problems = list(_problems(plan, stages, order, nodes))
    if problems:
        raise PlanError(f"{source} is no layout of stock Megatron", problems)
    replicas = plan.groups[0].replicas
    recompute = next(said_settings(plan)).settings.recompute or _NOTHING
    grid = Grid(
        layers=tuple(chunk.num_layers for chunk in plan.chunks),
        width=len(replicas),
        micro_batch_size=replicas[0].micro_batch_size,
        mode=recompute.mode,
        recomputed=recompute.num_layers,
        tensor=replicas[0].tp_degree,
        virtual=len(plan.chunks) // len(stages),
        distributed=plan.schedule.parameters.get(STOCK_OPTIMIZER) != REPLICATED,
        expert_parallel=int(plan.schedule.parameters.get(STOCK_EXPERT_PARALLEL, "1")),
    )
    return grid, order


def _problems(
    plan: Plan, stages: tuple[int, ...], order: tuple[int, ...], nodes: Sequence[range]
) -> Iterator[Problem]:
    yield from _schedule_problems(plan, stages)
    yield from _group_problems(plan)
    yield from _replica_problems(plan)
    yield from _memory_problems(plan)
    yield from _order_problems(order, nodes)


def _schedule_problems(plan: Plan, stages: tuple[int, ...]) -> Iterator[Problem]:
    count = len(stages)
    dealt = [chunk.group for chunk in plan.chunks]
    virtual = len(dealt) / count
    if dealt != [stages[number % count] for number in range(len(dealt))] or virtual % 1:
        yield _problem(
            "chunks",
            f"groups {_shown(dealt)}",
            f"groups {', '.join(map(str, stages))} in turn, each equally often",
        )
    elif virtual > 1 and count == 1:
        yield _problem(
            "chunks", f"{len(dealt)} of one group", "one: stock interleaves two stages or more"
        )
    wanted = "1f1b" if virtual == 1 else "interleaved"
    if plan.schedule.name != wanted:
        each = "one chunk" if virtual == 1 else "several chunks"
        yield _problem(
            "schedule.name", f'"{plan.schedule.name}"', f'"{wanted}", stock\'s for {each} a group'
        )
    rounds = plan.groups[0].replicas[0].num_microbatches
    if virtual > 1 and rounds % count:
        yield _problem(
            "groups[0].replicas[0].num_microbatches",
            f"{rounds}",
            f"a multiple of the {count} stages, as stock's interleaving asks for",
        )


def _group_problems(plan: Plan) -> Iterator[Problem]:
    widths = Counter(len(group.replicas) for group in plan.groups)
    width = widths.most_common(1)[0][0]
    first = plan.groups[0].compute_dtype
    for number, group in enumerate(plan.groups):
        where = f"groups[{number}]"
        if len(group.replicas) != width:
            found = f"{len(group.replicas)} replicas"
            yield _problem(where, found, f"{width}, as other groups have")
        if group.compute_dtype != first:
            yield _problem(
                f"{where}.compute_dtype",
                group.compute_dtype or "nothing",
                f"{first or 'nothing'}, as groups[0]: stock has one type for the job",
            )
        for name, what in _OF_OUR_RUNTIME.items():
            value = getattr(group, name)
            if value:
                yield _problem(f"{where}.{name}", _written(value), what)


_OF_OUR_RUNTIME = {
    "split_backward": "each backward in one piece",
    "grad_reduce_dtype": "gradients sent as they are kept",
    "hierarchical": "sums over all ranks at once",
}
"""Field of a group -> what stock does."""


def _replica_problems(plan: Plan) -> Iterator[Problem]:
    """Of each group and field the first replica, for all that differ."""
    first = plan.groups[0].replicas[0]
    for number, group in enumerate(plan.groups):
        unlike: dict[tuple[str, str], list[tuple[int, str]]] = {}
        for index, replica in enumerate(group.replicas):
            for field, found, expected in _unlike(replica, first, group.replicas[0]):
                unlike.setdefault((field, expected), []).append((index, found))
        for (field, expected), ((index, found), *others) in unlike.items():
            more = f" (and {len(others)} more of this group)" if others else ""
            yield _problem(f"groups[{number}].replicas[{index}].{field}", found + more, expected)
    if not first.num_microbatches:
        yield _problem("groups[0].replicas[0].num_microbatches", "0", "at least one")


def _unlike(replica: Replica, first: Replica, of_group: Replica) -> Iterator[tuple[str, str, str]]:
    """Yield (field, found, expected)."""
    for field, why, measured in _LIKE_THE_FIRST:
        found, wanted = measured(replica), measured(first)
        if found != wanted:
            yield field, f"{found}", f"{wanted}{why}"
    if replica.shard_weight != of_group.shard_weight or not of_group.shard_weight:
        yield "shard_weight", f"{replica.shard_weight:g}", "equal shards in a group"
    if replica.expert_parallel is not None:
        yield (
            "expert_parallel",
            "ranks that share experts",
            "each rank as a replica, and stock_expert_parallel in schedule.parameters",
        )
    if replica.uneven_tp_shards is not None:
        yield "tp_shards", "uneven TP shards", "equal ones in each TP group"
    if replica.ranks != tuple(sorted(replica.ranks)):
        yield "ranks", f"{list(replica.ranks)}", "them in order"
    if replica.max_in_flight is not None:
        yield (
            "max_in_flight",
            f"{replica.max_in_flight}",
            "as much in flight as stock has",
        )
    if replica.halved is not None:
        yield "halved", f"{replica.halved.num_whole} in halves", "whole micro-batches"
    if replica.region is not None:
        yield "region", f'"{replica.region}"', "samples to go to any region"


_LIKE_THE_FIRST: tuple[tuple[str, str, Callable[[Replica], int]], ...] = (
    ("micro_batch_size", ", the one size of the job", lambda each: each.micro_batch_size),
    ("num_microbatches", ", as groups[0].replicas[0] has", lambda each: each.num_microbatches),
    ("ranks", " of them, the one tensor-parallel degree", lambda each: each.tp_degree),
)
"""Field of a replica, why it is the same everywhere, and what to compare."""


def _memory_problems(plan: Plan) -> Iterator[Problem]:
    settings = list(said_settings(plan))
    first = settings[0].settings.recompute or _NOTHING
    told = set()
    for each in settings:
        recompute = each.settings.recompute or _NOTHING
        if recompute != first:
            told.add((each.recompute_at, _worded(recompute), f"{_worded(first)}, in all groups"))
        for field in fields(each.settings.offload):
            if getattr(each.settings.offload, field.name) is True:
                told.add((f"{each.offload_at}.{field.name}", "true", "everything on the GPU"))
    for where, found, expected in sorted(told):
        yield _problem(where, found, expected)


def _order_problems(order: tuple[int, ...], nodes: Sequence[range]) -> Iterator[Problem]:
    """torchrun numbers ranks node by node; nodes and the GPUs of each may be in any order."""
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    visits = Counter(number for number, _ in itertools.groupby(order, key=node_of.get))
    for number, times in visits.items():
        if number is not None and times > 1:
            ranks = spell(spans_of(list(nodes[number])))
            yield _problem(
                f"ranks {ranks}, one node",
                f"ranks of other nodes between them in stock's order ({_shown(order)})",
                "each node's ranks one after the other, stage by stage, as torchrun numbers them",
            )


def _problem(where: str, found: str, expected: str) -> Problem:
    return Problem(where=where, found=found, expected=expected, remedy=_REMEDY)


def _worded(recompute: Recompute) -> str:
    count = recompute.num_layers
    return recompute.mode if count is None else f"{recompute.mode} of {count} layers"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _shown(numbers: Sequence[int]) -> str:
    most = 16
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


# What starts unmodified Megatron in a layout: its flags, and each host's GPUs in order.


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node with the GPUs that its ranks are on, in the order of ranks."""

    name: str
    gpus: tuple[int, ...]
    """Numbers on the node, as CUDA_VISIBLE_DEVICES takes them."""


def hosts_of(inputs: Inputs, ranks: Sequence[int]) -> tuple[Host, ...]:
    """Hosts in the order of `--node-rank`. `ranks`: rank of stock's job -> rank of the cluster."""
    spec = inputs.spec
    return tuple(
        Host(
            name=spec.nodes[node].name,
            gpus=tuple(spec.nodes[node].numbers[rank - spec.ranks_of(node)[0]] for rank in some),
        )
        for node, some in itertools.groupby(ranks, key=spec.node_of)
    )


def layout_flags(grid: Grid) -> tuple[str, ...]:
    """Megatron's flags of a layout, with those that hide communication behind computation.

    Model, batch, type and `--sequence-parallel` are those of the training command.
    """
    return tuple(itertools.chain(_parallel(grid), _split(grid), _recompute(grid)))


def _parallel(grid: Grid) -> Iterator[str]:
    if grid.tensor > 1:
        yield from ("--tensor-model-parallel-size", str(grid.tensor))
    yield from ("--pipeline-model-parallel-size", str(grid.stages))
    if grid.expert_parallel > 1:
        yield from ("--expert-model-parallel-size", str(grid.expert_parallel))
    yield from ("--micro-batch-size", str(grid.micro_batch_size))
    if grid.distributed:
        yield from ("--use-distributed-optimizer", "--overlap-param-gather")
    yield "--overlap-grad-reduce"


def _split(grid: Grid) -> Iterator[str]:
    """Layers of each virtual stage: where they are even, without a layout."""
    ends = grid.counts_ends
    if grid.virtual > 1:
        yield "--overlap-p2p-communication-warmup-flush"
    if ends is None:
        yield from ("--pipeline-model-parallel-layout", grid.layout)
        return
    if grid.virtual > 1:
        yield from ("--num-virtual-stages-per-pipeline-rank", str(grid.virtual))
    if ends[0]:
        yield "--account-for-embedding-in-pipeline-split"
    if ends[1]:
        yield "--account-for-loss-in-pipeline-split"


def _recompute(grid: Grid) -> Iterator[str]:
    if grid.mode != "none":
        yield from ("--recompute-granularity", grid.mode)
    if grid.mode == "full":
        method, count = ("uniform", 1) if grid.recomputed is None else ("block", grid.recomputed)
        yield from ("--recompute-method", method, "--recompute-num-layers", str(count))
