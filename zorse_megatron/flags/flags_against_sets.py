"""Compare a command with the tensor-parallel sets of its plan."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.flags.table import defaults, spelling_of
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts
from zorse_megatron.schema.plan.set_rules import DividedSizes, set_problems, sets_of

# Argument -> values with which ranks of a set compute what one rank computes, and what to do.
_EXACT_IN_SETS: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_dropout": ((0.0,), "Add --attention-dropout 0."),
    "hidden_dropout": ((0.0,), "Add --hidden-dropout 0."),
    "sft": ((None, False), "Remove the flag, or use replicas of one rank."),
    "dataloader_inter_document_masking": (
        (None, False),
        "Remove the flag, or use replicas of one rank.",
    ),
}


def barring_sets(args: Namespace) -> list[str]:
    """Flags with which no plan may have sets, as they are spelled."""
    found = {name: getattr(args, name, None) for name in _EXACT_IN_SETS}
    known = {
        name: defaults().get(name) if value is None else value for name, value in found.items()
    }
    return [spelling_of(n) for n, value in known.items() if value not in _EXACT_IN_SETS[n][0]]


def set_flag_problems(args: Namespace, plan: Plan) -> Iterator[Problem]:
    """Yield what sets cannot do with these flags; nothing for a plan without sets.

    Arguments that Megatron derives later are None at first and not compared then.
    """
    where = next((where for where, _ in sets_of(plan)), None)
    if where is None:
        return
    for name, (values, remedy) in _EXACT_IN_SETS.items():
        value = getattr(args, name, None)
        if value is None:
            value = defaults().get(name)
        if value not in values:
            yield Problem(
                where=spelling_of(name),
                found=f"{value}, with a tensor-parallel set in {where}",
                expected=f"{values[-1]}" if values[-1] is not False else "no such flag",
                remedy=remedy,
            )
    unequal = [replica.unequal_parts for _, replica in sets_of(plan)]
    if _fuses_in_te(args) and any(parts and parts.vocabulary_rows for parts in unequal):
        yield Problem(
            where="--cross-entropy-fusion-impl",
            found="te, with unequal parts of the vocabulary",
            expected="native",
            remedy="Transformer Engine's cross entropy takes it that all parts are equal.",
        )
    yield from _mask_problems(args, plan)
    yield from _hash_problems(args, plan)
    # A plan that knows its model has been checked by itself.
    known = plan.model
    yield from set_problems(
        plan,
        DividedSizes(
            num_query_groups=None
            if known.num_query_groups or known.num_attention_heads
            else _query_groups(args),
            ffn_hidden_size=None if known.ffn_hidden_size else _whole(args, "ffn_hidden_size"),
            vocab_size=None if known.vocab_size else _whole(args, "padded_vocab_size"),
            sequence_length=_whole(args, "seq_length")
            if getattr(args, "sequence_parallel", False)
            else None,
        ),
    )


def _mask_problems(args: Namespace, plan: Plan) -> Iterator[Problem]:
    """Scripts broadcast masks in sets of the first and of the last stage only.

    Source: `megatron.core.utils.get_batch_on_this_tp_rank`; other ranks of a set in between would
    attend by a mask that nobody has written.
    """
    if not getattr(args, "reset_attention_mask", False):
        return
    if not getattr(args, "create_attention_mask_in_dataloader", True):
        return
    between = {chunk.group for chunk in plan.chunks[1:-1]}
    for where, _ in sets_of(plan):
        if any(where.startswith(f"groups[{number}].") for number in between):
            yield Problem(
                where=spelling_of("reset_attention_mask"),
                found=f"the flag, with a tensor-parallel set in {where}, whose group holds a chunk "
                "that is neither the first nor the last",
                expected="no such flag",
                remedy="Remove the flag, or use replicas of one rank for the chunks in between: "
                "Megatron hands masks to the sets of the first and the last stage only.",
            )
            return


def _hash_problems(args: Namespace, plan: Plan) -> Iterator[Problem]:
    """Stock compares hashes over the data-parallel group, where unlike replicas hold other parts.

    Source: `megatron.core.utils.check_param_hashes_across_dp_replicas`.
    """
    interval = getattr(args, "check_weight_hash_across_dp_replicas_interval", None)
    unlike = [n for n, group in enumerate(plan.groups) if not holds_equal_parts(group)]
    if interval is not None and unlike:
        yield Problem(
            where=spelling_of("check_weight_hash_across_dp_replicas_interval"),
            found=f"{interval}, with replicas in groups[{unlike[0]}] that cut layers differently",
            expected="no such flag",
            remedy="Remove the flag: such replicas have no parameters in common to compare.",
        )


def _fuses_in_te(args: Namespace) -> bool:
    fuses = getattr(args, "cross_entropy_loss_fusion", False)
    return bool(fuses) and getattr(args, "cross_entropy_fusion_impl", None) == "te"


def _query_groups(args: Namespace) -> int | None:
    grouped = getattr(args, "group_query_attention", False)
    return _whole(args, "num_query_groups" if grouped else "num_attention_heads")


def _whole(args: Namespace, name: str) -> int | None:
    value = getattr(args, name, None)
    return value if isinstance(value, int) else None
