"""What replicas of several ranks must be like, and a model of which they hold parts.

Sizes that are not known are not compared: a plan may leave them out, and the training command has
them all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.errors import Problem
from zorse_megatron.plan.memory_settings import settings_by_rank
from zorse_megatron.plan.plan import ExpertParallel, Plan, Replica

_TITLES = {
    "kv_groups": "KV groups",
    "mlp_columns": "columns of the MLP",
    "vocabulary_rows": "rows of the vocabulary",
    "experts": "experts",
}


@dataclass(frozen=True, kw_only=True)
class DividedSizes:
    """Sizes of a model that TP groups divide."""

    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    """Padding included."""
    num_experts: int | None = None
    """Of each layer; 0: the model has none."""
    sequence_length: int | None = None
    """None without sequence parallelism, which divides it."""


def sizes_of(plan: Plan) -> DividedSizes:
    """What the plan itself says of its model."""
    model = plan.model
    says_experts = model.num_experts is not None or model.ffn_hidden_size is not None
    return DividedSizes(
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        ffn_hidden_size=None
        if model.num_experts and not model.moe_layer_freq
        else model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        num_experts=(model.num_experts or 0) if says_experts else None,
    )


def tp_groups_of(plan: Plan) -> Iterator[tuple[str, Replica]]:
    """Yield those of them that are TP groups."""
    for where, replica in replicas_of_several_ranks(plan):
        if replica.tp_degree > 1:
            yield where, replica


def replicas_that_share_experts(plan: Plan) -> Iterator[tuple[str, Replica, ExpertParallel]]:
    """Yield those whose ranks share experts alone, with their place in the plan."""
    for number, index, replica in plan.numbered_replicas():
        if replica.expert_parallel is not None:
            yield f"groups[{number}].replicas[{index}]", replica, replica.expert_parallel


def replicas_of_several_ranks(plan: Plan) -> Iterator[tuple[str, Replica]]:
    """Yield TP groups, and replicas whose ranks share experts, with their place in the plan."""
    for number, index, replica in plan.numbered_replicas():
        if len(replica.ranks) > 1:
            yield f"groups[{number}].replicas[{index}].ranks", replica


def divided_problems(plan: Plan, sizes: DividedSizes) -> Iterator[Problem]:
    """Yield every replica whose ranks cannot hold parts of a model of these sizes."""
    yield from _tp_problems(plan, sizes)
    number = sizes.num_experts
    for where, _, shared in replicas_that_share_experts(plan):
        if number == 0:
            yield _of_a_dense_model(f"{where}.expert_parallel")
        elif number is not None and sum(shared.experts) != number:
            yield _unlike_whole(f"{where}.expert_parallel.experts", shared.experts, number)


def _tp_problems(plan: Plan, sizes: DividedSizes) -> Iterator[Problem]:
    for where, replica in tp_groups_of(plan):
        degree = len(replica.ranks)
        given = (
            {title: getattr(replica.tp_shards, field) for field, title in _TITLES.items()}
            if replica.tp_shards
            else {}
        )
        for name, size, remedy in _divided(sizes):
            counts = given.get(name)
            if counts is not None and size is not None and sum(counts) != size:
                there = where.replace(".ranks", ".tp_shards")
                yield _unlike_whole(there, counts, size, f"{name} ")
            elif counts is None and size and name == "experts":
                yield Problem(
                    where=where.replace(".ranks", ".tp_shards"),
                    found=f"no experts, of a model with {size} in each layer",
                    expected=f"how many of them each of the {degree} ranks has",
                    remedy=remedy,
                )
            elif counts is None and size is not None and size % degree:
                larger = name == "KV groups" and size < degree
                yield Problem(
                    where=where,
                    found=f"{degree} ranks {list(replica.ranks)} for {size} {name}",
                    expected=f"at most {size} ranks" if larger else f"a divisor of {size}",
                    remedy=remedy,
                )


def expert_parallel_problems(plan: Plan) -> Iterator[Problem]:
    """Ranks that share experts have a part each of them and of the micro-batch."""
    for where, replica, shared in replicas_that_share_experts(plan):
        here = f"{where}.expert_parallel"
        wholes = {"experts": plan.model.num_experts, "samples": replica.micro_batch_size}
        for name, whole in wholes.items():
            yield from _counts_problems(f"{here}.{name}", replica, getattr(shared, name), whole)
        weights = shared.shard_weights
        if weights is not None and not (
            len(weights) == len(replica.ranks) and 0 < sum(weights) < math.inf
        ):
            yield Problem(
                where=f"{here}.shard_weights",
                found=f"{list(weights)}",
                expected=f"{len(replica.ranks)} weights, one per rank, with a positive, finite sum",
                remedy="Correct them, or leave them out: then shares are equal.",
            )
        if shared.overlap:
            yield from _overlap_problems(plan, where, replica, shared)
        yield from _beside_expert_parallel(plan, where, replica)


def _overlap_problems(
    plan: Plan, where: str, replica: Replica, shared: ExpertParallel
) -> Iterator[Problem]:
    """Halves have whole samples, and in a layer that is recomputed nothing is interleaved."""
    if any(count % 2 for count in shared.samples):
        yield Problem(
            where=f"{where}.expert_parallel.samples",
            found=f"{list(shared.samples)} with overlap",
            expected="even numbers, as a micro-batch runs as two halves",
            remedy="Change them, or remove overlap.",
        )
    recompute = settings_by_rank(plan)[replica.ranks[0]].recompute
    if recompute is not None and recompute.mode == "full":
        yield Problem(
            where=f"{where}.expert_parallel.overlap",
            found="true, with layers that are recomputed",
            expected='recompute of mode "none" or "selective"',
            remedy="Change the mode, or remove overlap.",
        )


def _beside_expert_parallel(plan: Plan, where: str, replica: Replica) -> Iterator[Problem]:
    here = f"{where}.expert_parallel"
    if len(replica.ranks) == 1:
        yield Problem(
            where=here,
            found="expert_parallel of a replica of one rank",
            expected="several ranks, which share the experts",
            remedy="Remove it: the rank has all experts.",
        )
    if replica.tp_shards is not None:
        yield Problem(
            where=f"{where}.tp_shards",
            found="tp_shards beside expert_parallel",
            expected="one of the two: ranks share whole layers, or their experts alone",
            remedy="Remove one.",
        )
    if replica.halved is not None:
        yield Problem(
            where=f"{where}.halved",
            found="halves of micro-batches beside expert_parallel",
            expected="whole micro-batches, of which each rank has samples of its own",
            remedy="Remove halved.",
        )
    model = plan.model
    if model.num_experts is None and model.ffn_hidden_size is not None:
        yield _of_a_dense_model(here)


def _of_a_dense_model(where: str) -> Problem:
    return Problem(
        where=where,
        found="expert_parallel, of a model without experts",
        expected="a model with experts, which the ranks share",
        remedy="Remove it, or train a model with --num-experts.",
    )


def tp_shards_problems(plan: Plan) -> Iterator[Problem]:
    """Parts have one entry per rank, and together they are the whole, where that is known."""
    model = plan.model
    wholes = {
        "kv_groups": model.num_query_groups or model.num_attention_heads,
        "mlp_columns": model.ffn_hidden_size,
        "vocabulary_rows": model.vocab_size,
        "experts": model.num_experts,
    }
    for number, index, replica in plan.numbered_replicas():
        for name, whole in wholes.items() if replica.tp_shards else ():
            counts = getattr(replica.tp_shards, name)
            where = f"groups[{number}].replicas[{index}].tp_shards.{name}"
            if counts is not None:
                yield from _counts_problems(where, replica, counts, whole)


def _counts_problems(
    where: str, replica: Replica, counts: tuple[int, ...], whole: int | None
) -> Iterator[Problem]:
    degree = len(replica.ranks)
    if len(counts) != degree:
        yield Problem(
            where=where,
            found=f"{len(counts)} entries",
            expected=f"{degree}, one per rank of the replica",
            remedy="Give one entry per rank in the order of ranks, or leave it out.",
        )
    elif sum(counts) != (whole or sum(counts)) or not sum(counts):
        yield _unlike_whole(where, counts, whole)


def _unlike_whole(where: str, counts: tuple[int, ...], whole: int | None, of: str = "") -> Problem:
    owner = "the replica's micro_batch_size" if where.endswith(".samples") else "as the model has"
    expected = "more than 0 in all" if whole is None else f"{whole} in all, {owner}"
    return Problem(
        where=where,
        found=f"{list(counts)}, {sum(counts)} {of}in all",
        expected=expected,
        remedy="Parts neither overlap nor leave anything out: correct the numbers.",
    )


def _divided(sizes: DividedSizes) -> Iterator[tuple[str, int | None, str]]:
    whole = "Each rank holds whole KV groups: use a TP group of fewer ranks, or give its tp_shards."
    yield "KV groups", sizes.num_query_groups, whole
    if sizes.num_query_groups is None:
        yield "attention heads", sizes.num_attention_heads, whole
    yield (
        "columns of the MLP",
        sizes.ffn_hidden_size,
        "Use a TP group of another number of ranks, or give its tp_shards.",
    )
    yield (
        "rows of the vocabulary",
        sizes.vocab_size,
        "Pad the vocabulary to a multiple (--make-vocab-size-divisible-by), or give its tp_shards.",
    )
    yield "experts", sizes.num_experts, 'Give one number per rank, as in "experts": [5, 3].'
    yield (
        "positions of a sequence",
        sizes.sequence_length,
        "Sequence parallelism divides the sequence: remove --sequence-parallel, or change "
        "--seq-length.",
    )
