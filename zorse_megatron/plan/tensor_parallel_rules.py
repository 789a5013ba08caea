"""What a model must be like for a plan's tensor-parallel groups to hold parts of its layers.

Sizes that are not known are not compared: a plan may leave them out, and the training command has
them all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zorse_megatron.errors import Problem
from zorse_megatron.plan.plan import Plan, Replica

_TITLES = {
    "kv_groups": "KV groups",
    "mlp_columns": "columns of the MLP",
    "vocabulary_rows": "rows of the vocabulary",
}


@dataclass(frozen=True, kw_only=True)
class DividedSizes:
    """Sizes of a model that TP groups divide."""

    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    """Padding included."""
    sequence_length: int | None = None
    """None without sequence parallelism, which divides it."""


def sizes_of(plan: Plan) -> DividedSizes:
    """What the plan itself says of its model."""
    model = plan.model
    return DividedSizes(
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups or model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
    )


def tp_groups_of(plan: Plan) -> Iterator[tuple[str, Replica]]:
    """Yield the replicas of several ranks, with their place in the plan."""
    for number, group in enumerate(plan.groups):
        for index, replica in enumerate(group.replicas):
            if len(replica.ranks) > 1:
                yield f"groups[{number}].replicas[{index}].ranks", replica


def tp_problems(plan: Plan, sizes: DividedSizes) -> Iterator[Problem]:
    """Yield every TP group that cannot hold parts of a model of these sizes."""
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
                yield Problem(
                    where=where.replace(".ranks", ".tp_shards"),
                    found=f"{list(counts)}, {sum(counts)} {name} in all",
                    expected=f"{size}, as the model has",
                    remedy="Parts neither overlap nor leave anything out: correct the numbers.",
                )
            elif counts is None and size is not None and size % degree:
                larger = name == "KV groups" and size < degree
                yield Problem(
                    where=where,
                    found=f"{degree} ranks {list(replica.ranks)} for {size} {name}",
                    expected=f"at most {size} ranks" if larger else f"a divisor of {size}",
                    remedy=remedy,
                )


def tp_shards_problems(plan: Plan) -> Iterator[Problem]:
    """Parts have one entry per rank, and together they are the whole, where that is known."""
    model = plan.model
    wholes = {
        "kv_groups": model.num_query_groups or model.num_attention_heads,
        "mlp_columns": model.ffn_hidden_size,
        "vocabulary_rows": model.vocab_size,
    }
    for index, group in enumerate(plan.groups):
        for number, replica in enumerate(group.replicas):
            for name, whole in wholes.items() if replica.tp_shards else ():
                counts = getattr(replica.tp_shards, name)
                where = f"groups[{index}].replicas[{number}].tp_shards.{name}"
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
        yield Problem(
            where=where,
            found=f"{list(counts)}, {sum(counts)} in all",
            expected=f"{whole or 'more than 0'} in all, as the model has",
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
    yield (
        "positions of a sequence",
        sizes.sequence_length,
        "Sequence parallelism divides the sequence: remove --sequence-parallel, or change "
        "--seq-length.",
    )
