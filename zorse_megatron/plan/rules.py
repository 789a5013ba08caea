"""What values of a plan must hold together; all breaches are reported at once.

Each rule is one function that yields a Problem for every breach; `problems_of` runs them all, so
that a bad plan gets all its errors at once.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from zorse_megatron.errors import Problem
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.plan.divided_replicas import expert_parallel_problems, tp_shards_problems
from zorse_megatron.plan.memory_settings import said_settings
from zorse_megatron.plan.plan import (
    Group,
    Plan,
    Replica,
    data_parallel_ranks,
    has_equal_tp_shards,
    ranks_by_region,
)
from zorse_megatron.plan.spans import Span, gaps, overlaps, spans_of, spell

# Which parameters each schedule takes, and their values; the first one is the default.
SCHEDULE_PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "1f1b": {"stock_optimizer": ("distributed", "replicated")},
    "interleaved": {"stock_optimizer": ("distributed", "replicated")},
    "breadth_first": {"parameters": ("per_pass", "resident", "per_micro_batch")},
}
STOCK_EXPERT_PARALLEL = "stock_expert_parallel"
"""Another one of the first two: over how many replicas of a group unmodified Megatron spreads the
experts of each layer; nothing else can do that."""

# A message lists at most this many items, so that a plan for 1,000 ranks stays readable.
_MAX_LISTED = 16


def problems_of(plan: Plan) -> tuple[Problem, ...]:
    """Return every breach of the rules, or () for a valid plan."""
    rules = (
        _ranks,
        _layers,
        _chunk_groups,
        _transfers,
        _batch,
        _halves,
        _shard_weights,
        tp_shards_problems,
        expert_parallel_problems,
        _recomputed_layers,
        _state_fractions,
        hierarchical_problems,
        _lengths,
        _orders,
        _compute_dtypes,
        _schedule_parameters,
    )
    return tuple(problem for rule in rules for problem in rule(plan))


def _ranks(plan: Plan) -> Iterator[Problem]:
    """Ranks are exactly 0..W-1, each once."""
    listed_at: dict[int, list[str]] = defaultdict(list)
    for number, index, replica in plan.numbered_replicas():
        for rank in replica.ranks:
            listed_at[rank].append(f"groups[{number}].replicas[{index}]")
    for rank in sorted(listed_at):
        if rank < 0:
            yield Problem(
                where=f"{listed_at[rank][0]}.ranks",
                found=f"rank {rank}",
                expected="ranks numbered from 0",
                remedy="Use the global ranks of torch.distributed.",
            )
        if len(listed_at[rank]) > 1:
            yield Problem(
                where="groups",
                found=f"rank {rank} in {len(listed_at[rank])} places: {_listed(listed_at[rank])}",
                expected="every rank in exactly one replica",
                remedy=f"Keep rank {rank} in one of them.",
            )
    highest = max(0, *listed_at)
    missing = gaps(spans_of(listed_at), highest + 1)
    if missing:
        yield Problem(
            where="groups",
            found=f"{_named('rank', missing)} in no replica",
            expected=f"every rank from 0 to {highest}, the highest, in exactly one replica",
            remedy="Add a replica for each missing rank (0 micro-batches is allowed), or renumber.",
        )


def _layers(plan: Plan) -> Iterator[Problem]:
    """Chunks in model order cover [0, num_layers) without gap or overlap; none is empty."""
    total = plan.model.num_layers
    with_experts = plan.model.moe_layer_freq
    if with_experts is not None and (len(with_experts) != total or not plan.model.num_experts):
        yield Problem(
            where="model.moe_layer_freq",
            found=f"{len(with_experts)} entries, for {total} layers and "
            f"{plan.model.num_experts or 'no'} experts",
            expected="one per layer, of a model with num_experts",
            remedy="Correct them, or leave it out where all layers have experts, or none.",
        )
    elif with_experts is not None and len({*with_experts}) == 1:
        yield Problem(
            where="model.moe_layer_freq",
            found=f"{with_experts[0]} for all layers",
            expected="layers with experts and layers without",
            remedy="Leave it out; without experts, leave num_experts out, too.",
        )
    for index, chunk in enumerate(plan.chunks):
        first, stop = chunk.layers
        if first >= stop or first < 0 or stop > total:
            shape = "at least one layer" if first >= stop else f"layers within [0, {total})"
            yield Problem(
                where=f"chunks[{index}].layers",
                found=f"[{first}, {stop}]",
                expected=f"[first, stop] with {shape}; the model has {total} layers",
                remedy="Give the first layer and the one after the last, counted from 0.",
            )
    spans = [chunk.layers for chunk in plan.chunks]
    missing = gaps(spans, total)
    if missing:
        yield Problem(
            where="chunks",
            found=f"{_named('layer', missing)} in no chunk",
            expected=f"every layer from 0 to {total - 1} in exactly one chunk",
            remedy="Without a chunk a layer would silently not be trained: extend a chunk to it.",
        )
    for doubled in overlaps(spans):
        holders = [i for i, (a, b) in enumerate(spans) if a < doubled[1] and doubled[0] < b]
        yield Problem(
            where="chunks",
            found=f"{_named('layer', [doubled])} in more than one chunk: "
            + _listed([f"chunks[{i}]" for i in holders]),
            expected=f"every layer from 0 to {total - 1} in exactly one chunk",
            remedy="Let one of these chunks stop earlier or start later.",
        )
    yield from _layer_order(spans)


def _layer_order(spans: list[Span]) -> Iterator[Problem]:
    held = [(index, span) for index, span in enumerate(spans) if span[0] < span[1]]
    for (before, early), (after, late) in pairwise(held):
        if late[0] < early[0]:
            yield Problem(
                where=f"chunks[{after}].layers",
                found=f"{list(late)} after {list(early)} of chunks[{before}]",
                expected="chunks in model order",
                remedy="Sort the chunks by their first layer.",
            )


def _chunk_groups(plan: Plan) -> Iterator[Problem]:
    """Every chunk names a group, and every group holds a chunk."""
    last = len(plan.groups) - 1
    for index, chunk in enumerate(plan.chunks):
        if not 0 <= chunk.group <= last:
            yield Problem(
                where=f"chunks[{index}].group",
                found=str(chunk.group),
                expected=f"a group from 0 to {last}",
                remedy="Groups are counted from 0 in the order of the list groups.",
            )
    for group_index in range(len(plan.groups)):
        if not plan.chunks_of_group(group_index):
            yield Problem(
                where=f"groups[{group_index}]",
                found="a group without a chunk",
                expected="at least one chunk for every group",
                remedy=f'Add a chunk with "group": {group_index}, or remove the group.',
            )


def _transfers(plan: Plan) -> Iterator[Problem]:
    """Transfers are between chunks of two groups."""
    for index, chunk in enumerate(plan.chunks):
        if chunk.transfer is None:
            continue
        is_last = index == len(plan.chunks) - 1
        if is_last or plan.chunks[index + 1].group == chunk.group:
            yield Problem(
                where=f"chunks[{index}].transfer",
                found="a transfer after the last chunk"
                if is_last
                else f"a transfer to chunks[{index + 1}] of the same group {chunk.group}",
                expected="a transfer only to a chunk of another group",
                remedy="Remove it: nothing is sent there.",
            )


def _batch(plan: Plan) -> Iterator[Problem]:
    """In every group the replicas' samples add up to the global batch."""
    for index, group in enumerate(plan.groups):
        total = sum(replica.num_samples for replica in group.replicas)
        if total != plan.global_batch_size:
            sums = [_replica_sum(i, replica) for i, replica in enumerate(group.replicas)]
            yield Problem(
                where=f"groups[{index}]",
                found=f"{total} samples ({_listed(sums)})",
                expected=f"global_batch_size = {plan.global_batch_size} samples in every group",
                remedy="Change micro_batch_size or num_microbatches of its replicas by "
                f"{plan.global_batch_size - total:+d} samples in all.",
            )


def _replica_sum(index: int, replica: Replica) -> str:
    size, count = replica.micro_batch_size, replica.num_microbatches
    return f"replicas[{index}] {size} x {count} = {replica.num_samples}"


def _halves(plan: Plan) -> Iterator[Problem]:
    """Only whole micro-batches of two samples or more can be run in halves, each once."""
    for number, index, replica in plan.numbered_replicas():
        halved, count = replica.halved, replica.num_microbatches
        if halved is not None and (halved.num_whole > count or replica.micro_batch_size < 2):
            yield Problem(
                where=f"groups[{number}].replicas[{index}].halved",
                found=f"{halved.num_whole} in halves, of {count} x {replica.micro_batch_size}",
                expected="at most all of them, with 2 samples or more",
                remedy="Remove halved, or give smaller numbers.",
            )


def _shard_weights(plan: Plan) -> Iterator[Problem]:
    """In every group the weights have a positive, finite sum to divide by."""
    for index, group in enumerate(plan.groups):
        total = sum(replica.shard_weight for replica in group.replicas)
        if total <= 0 or math.isinf(total):
            yield Problem(
                where=f"groups[{index}]",
                found=f"shard_weight values that add up to {total}",
                expected="a positive, finite sum",
                remedy="Some replica must own the training state; use 1 for each for equal shards.",
            )


def _recomputed_layers(plan: Plan) -> Iterator[Problem]:
    """A number of recomputed layers needs mode full."""
    for number, group in enumerate(plan.groups):
        replicas = [(f".replicas[{n}]", each.recompute) for n, each in enumerate(group.replicas)]
        for inner, recompute in [("", group.recompute), *replicas]:
            if recompute and recompute.num_layers is not None and recompute.mode != "full":
                yield Problem(
                    where=f"groups[{number}]{inner}.recompute.num_layers",
                    found=f'{recompute.num_layers} with mode "{recompute.mode}"',
                    expected='num_layers only with mode "full"',
                    remedy="Remove num_layers or change the mode.",
                )


def _state_fractions(plan: Plan) -> Iterator[Problem]:
    """A part of the optimizer state waits in the host only where the state does."""
    for each in said_settings(plan):
        offload = each.settings.offload
        if offload.optimizer_state_fraction is not None and not offload.optimizer_state:
            yield Problem(
                where=f"{each.offload_at}.optimizer_state_fraction",
                found=f"{offload.optimizer_state_fraction} without optimizer_state",
                expected="it with optimizer_state only, of which it is the part in the host",
                remedy="Add optimizer_state, or remove the fraction.",
            )


def _lengths(plan: Plan) -> Iterator[Problem]:
    """Lists with one entry per rank have as many entries as there are ranks."""
    cluster, predictions = plan.cluster, plan.predictions
    lists = {
        "cluster.gpu_kinds": cluster.gpu_kinds if cluster else None,
        "predictions.peak_memory_bytes": predictions.peak_memory_bytes if predictions else None,
        "predictions.micro_batch_s": predictions.micro_batch_s if predictions else None,
    }
    for where, values in lists.items():
        if values is not None and len(values) != plan.world_size:
            yield Problem(
                where=where,
                found=f"{len(values)} entries",
                expected=f"{plan.world_size}, one per rank",
                remedy="Give one entry per global rank in rank order, or leave the list out.",
            )


def _orders(plan: Plan) -> Iterator[Problem]:
    """What orders follow is given for all replicas that run micro-batches, or for none."""
    working = [
        (f"groups[{number}].replicas[{index}]", number, replica)
        for number, index, replica in plan.numbered_replicas()
        if replica.num_microbatches
    ]
    for name in ("compute_s", "max_in_flight"):
        absent = [where for where, _, replica in working if getattr(replica, name) is None]
        if 0 < len(absent) < len(working):
            yield Problem(
                where=f"{absent[0]}.{name}",
                found="nothing, while other replicas have it",
                expected="it in every replica with micro-batches, or in none",
                remedy="Add it, or remove it everywhere; zorse plan writes all of them.",
            )
    for where, number, replica in working:
        chunks = len(plan.chunks_of_group(number))
        if replica.compute_s is not None and len(replica.compute_s) != chunks:
            yield Problem(
                where=f"{where}.compute_s",
                found=f"{len(replica.compute_s)} entries",
                expected=f"{chunks}, one for each chunk of group {number}",
                remedy="Give forward, backward and weight gradients of each chunk, in model order.",
            )
        if replica.max_delayed_wgrad and not plan.groups[number].split_backward:
            yield Problem(
                where=f"{where}.max_delayed_wgrad",
                found=f"{replica.max_delayed_wgrad} without split_backward",
                expected="split_backward of the group with it: true, or no weight gradients wait",
                remedy="Add it, or remove max_delayed_wgrad.",
            )
        if replica.max_in_flight and plan.schedule.name == "breadth_first":
            yield Problem(
                where=f"{where}.max_in_flight",
                found=f"{replica.max_in_flight}",
                expected="nothing under breadth_first, which has all samples in flight anyway",
                remedy="Remove it, or choose the schedule 1f1b or interleaved.",
            )


def _compute_dtypes(plan: Plan) -> Iterator[Problem]:
    """GPUs have units for what their group computes in, as far as their kinds are known."""
    kinds = plan.cluster.gpu_kinds if plan.cluster else None
    if kinds is not None and len(kinds) == plan.world_size:
        yield from without_members(plan, kinds, GPU_KINDS)


def without_members(
    plan: Plan, kinds: Sequence[str], known: Mapping[str, GpuKind]
) -> Iterator[Problem]:
    """Yield groups with kinds that lack units for their type. `kinds`: of each rank."""
    for number, group in enumerate(plan.groups):
        names = {kinds[rank] for rank in group.ranks if 0 <= rank < len(kinds)}
        there = sorted(names & known.keys())
        without = [name for name in there if not known[name].computes_in(group.compute_dtype)]
        if without:
            yield Problem(
                where=f"groups[{number}].compute_dtype",
                found=f'"{group.compute_dtype}" on {", ".join(without)}, without support for it',
                expected="a dtype that all GPUs of the group support",
                remedy="V100 and T4 support fp16, GPUs from Ampere on also bf16, all of them fp32; "
                "or place these GPUs in another group.",
            )


def _schedule_parameters(plan: Plan) -> Iterator[Problem]:
    known = SCHEDULE_PARAMETERS[plan.schedule.name]
    by_stock = {STOCK_EXPERT_PARALLEL} if "stock_optimizer" in known else set()
    for name in sorted(set(plan.schedule.parameters) - set(known) - by_stock):
        yield Problem(
            where=f"schedule.parameters.{name}",
            found=f'a parameter that schedule "{plan.schedule.name}" does not have',
            expected=f"one of {', '.join(sorted(known))}" if known else "no parameters",
            remedy="Remove it, or choose the schedule that it belongs to.",
        )
    for name in sorted(set(plan.schedule.parameters) & set(known)):
        value = plan.schedule.parameters[name]
        if value not in known[name]:
            yield Problem(
                where=f"schedule.parameters.{name}",
                found=repr(value),
                expected=f"one of {', '.join(map(repr, known[name]))}",
                remedy=f"Remove it for {known[name][0]!r}, or choose one of these.",
            )
    degree = plan.schedule.parameters.get(STOCK_EXPERT_PARALLEL, "1")
    divided = [plan.model.num_experts or 1, *(len(group.replicas) for group in plan.groups)]
    if not degree.isdecimal() or int(degree) < 1 or any(n % int(degree) for n in divided):
        yield Problem(
            where=f"schedule.parameters.{STOCK_EXPERT_PARALLEL}",
            found=repr(degree),
            expected="a number that divides the experts of a layer and the replicas of each group",
            remedy="Remove it, so that each rank has all experts, or choose such a number.",
        )


def _named(noun: str, spans: list[Span]) -> str:
    """Say `layer 3` or `layers 3 to 5, 7`, and how many when they are not easy to count."""
    count = sum(stop - first for first, stop in spans)
    if count == 1:
        return f"{noun} {spell(spans)}"
    more = f" and {len(spans) - _MAX_LISTED} more spans" if len(spans) > _MAX_LISTED else ""
    return f"{noun}s {spell(spans[:_MAX_LISTED])}{more} ({count} in all)"


def _listed(items: list[str]) -> str:
    more = [f"and {len(items) - _MAX_LISTED} more"] if len(items) > _MAX_LISTED else []
    return ", ".join(items[:_MAX_LISTED] + more)


# Rules of groups that sum and gather in two levels: within regions, and between them.


def hierarchical_problems(plan: Plan) -> Iterator[Problem]:
    """Each hierarchical group has regions, ranks region by region, and nothing against it."""
    for number, group in enumerate(plan.groups):
        if group.hierarchical:
            where = f"groups[{number}]"
            yield from _regions(where, group)
            yield from _settings(where, group)


def _regions(where: str, group: Group) -> Iterator[Problem]:
    nowhere = [at for at, replica in enumerate(group.replicas) if replica.region is None]
    regions = {replica.region for replica in group.replicas}
    if nowhere:
        yield Problem(
            where=f"{where}.replicas[{nowhere[0]}].region",
            found=f"nothing, in a hierarchical group ({len(nowhere)} such replicas)",
            expected="the region of each replica",
            remedy="Name it, or remove hierarchical.",
        )
    elif len(regions) == 1:
        yield Problem(
            where=f"{where}.hierarchical",
            found=f"true, with all replicas in region {regions.pop()}",
            expected="replicas in two regions or more",
            remedy="Remove it: there is one level only.",
        )
    elif has_equal_tp_shards(group):
        yield from _scattered(where, group, len(regions))


def _scattered(where: str, group: Group, num_regions: int) -> Iterator[Problem]:
    """Shards are cut in the order of ranks, so a region's must be neighbours."""
    for ranks in data_parallel_ranks(group):
        runs = ranks_by_region(group, ranks)
        if len(runs) > num_regions:
            yield Problem(
                where=f"{where}.hierarchical",
                found=f"true, with the ranks of {num_regions} regions mixed: rank {runs[1][0]} is "
                f"between ranks {runs[0][0]} and {runs[2][0]}",
                expected="the ranks of each region next to each other among those of the group",
                remedy="List the cluster's nodes region by region, or remove hierarchical.",
            )
            return


def _settings(where: str, group: Group) -> Iterator[Problem]:
    if not has_equal_tp_shards(group):
        yield Problem(
            where=f"{where}.hierarchical",
            found="true, with replicas that cut their layers differently or share experts",
            expected="replicas of equal numbers of ranks, with equal parts",
            remedy="Remove it: such replicas exchange parts directly.",
        )
    if group.grad_reduce_dtype is not None:
        yield Problem(
            where=f"{where}.grad_reduce_dtype",
            found=f'"{group.grad_reduce_dtype}" with hierarchical',
            expected="one of the two",
            remedy="Remove one: 16-bit gradients go to their owners directly.",
        )
