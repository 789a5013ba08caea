"""Validate a command's arguments under a plan, or for planning.

The same rules check a command line that is read without Megatron (`flags.command`) and the
arguments that Megatron has parsed; the latter may say more, as from a checkpoint.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.flags.flag_handling import is_refused, refusable
from zorse_megatron.flags.flags_against_plan import (
    batch_problems,
    layout_problems,
    model_flag_problems,
    stage_problems,
)
from zorse_megatron.flags.flags_against_sets import set_flag_problems
from zorse_megatron.flags.refused import DECIDED
from zorse_megatron.flags.table import defaults, spelling_of
from zorse_megatron.flags.types import (
    attention_problems,
    communication_dtype_problems,
    device_problems,
    dtype_problems,
)
from zorse_megatron.schedules.breadth_first import RESIDENT, parameters_setting
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.plan.memory_settings import said_settings
from zorse_megatron.schema.plan.plan import Plan

_WITHOUT = "Remove the flag, or train without --zorse-plan."
# Argument -> values of it that a plan does not work with, and what to do.
_REFUSED_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "position_embedding_type": (("mrope", "relative"), _WITHOUT),
    "transformer_impl": (("inference_optimized",), _WITHOUT),
    "attention_backend": (
        ("local",),
        "Use --transformer-impl local: stock's own check of this value fails without --spec.",
    ),
}
_FUSED = ("flash", "fused")
RECOMPUTED_MODULES = ("core_attn", "mlp", "layernorm")
"""What selective recomputation recomputes in dense layers."""


def command_problems(
    args: Namespace, plan: Plan | None, kinds: Mapping[str, GpuKind] | None = None
) -> list[Problem]:
    """Everything in the arguments that does not fit the plan, or any plan where there is none.

    `kinds`: of the cluster's GPUs where they are known beyond the well-known ones.
    """
    problems = [*_refused(args), *_refused_values(args), *_attention_problems(args)]
    problems += [*_recompute_setting_problems(args), *_checkpoint_problems(args)]
    if plan is None:
        return problems + list(_decided_problems(args))
    return [
        *problems,
        *stage_problems(args, plan),
        *_hash_problems(args, plan),
        *_recompute_problems(args, plan),
        *communication_dtype_problems(args, plan),
        *dtype_problems(args, plan),
        *device_problems(args, plan, kinds),
        *attention_problems(args, plan, kinds),
        *layout_problems(args, plan),
        *batch_problems(args, plan),
        *model_flag_problems(args, plan),
        *set_flag_problems(args, plan),
    ]


def plain_value(value: Any) -> Any:
    """The value as a command spells it: an enumeration member by its name."""
    return getattr(value, "name", value)


def interval_problems(args: Namespace) -> Iterator[Problem]:
    """An interval that Megatron has no default for, and fails without, saying nothing.

    By the one of evaluations it divides before it trains, also with --eval-iters 0: a TypeError in
    `get_train_valid_test_num_samples`. That of saves is a bare assertion in `validate_args`.
    """
    interval = getattr(args, "eval_interval", None)
    if interval is None or interval < 1:
        yield Problem(
            where="--eval-interval",
            found="no such flag" if interval is None else f"{interval}",
            expected="a number of iterations: Megatron counts evaluations before it trains",
            remedy="Such as --eval-interval 1000; with --eval-iters 0 it then evaluates nothing.",
        )
    interval = getattr(args, "save_interval", None)
    if getattr(args, "save", None) is not None and (interval is None or interval < 1):
        yield Problem(
            where="--save-interval",
            found="no such flag, beside --save" if interval is None else f"{interval}",
            expected="a number of iterations",
            remedy="Such as --save-interval 500.",
        )


def _refused(args: Namespace) -> Iterator[Problem]:
    unset = defaults()
    for name in refusable():
        value = getattr(args, name, None)
        if value is None or value is unset[name]:  # as most are
            continue
        family = is_refused(name, value)
        if family is None:
            continue
        accepted = " or ".join(map(str, family.accepted)) or "no such flag"
        yield Problem(
            where=spelling_of(name),
            found=_found(value),
            expected=f"{accepted} under a plan ({_lowered(family.what)})",
            remedy=family.remedy,
        )


def _found(value: Any) -> str:
    return "the flag" if isinstance(value, bool) else f"{plain_value(value)!r}"


def _lowered(text: str) -> str:
    """A phrase in the middle of a sentence; abbreviations and names stay as they are."""
    is_word = text[1:2].islower() or text[1:2] == " "
    names = ("Adam", "Megatron", "Transformer", "MuP")
    return text[0].lower() + text[1:] if is_word and not text.startswith(names) else text


def _refused_values(args: Namespace) -> Iterator[Problem]:
    for name, (values, remedy) in _REFUSED_VALUES.items():
        value = plain_value(getattr(args, name, None))
        if value in values:
            yield Problem(
                where=spelling_of(name),
                found=f"{value!r}",
                expected="another value under a plan",
                remedy=remedy,
            )


def _attention_problems(args: Namespace) -> Iterator[Problem]:
    """The local implementation has one attention; stock would take it without a word."""
    backend = plain_value(getattr(args, "attention_backend", None))
    if getattr(args, "transformer_impl", None) == "local" and backend in _FUSED:
        yield Problem(
            where="--attention-backend",
            found=f"{backend!r} with --transformer-impl local",
            expected="auto or unfused with it: stock ignores the others",
            remedy="Remove one of the two.",
        )


def _recompute_setting_problems(args: Namespace) -> Iterator[Problem]:
    """Settings that Megatron's transformer config would refuse with a traceback."""
    mode = getattr(args, "recompute_granularity", None)
    method = getattr(args, "recompute_method", None)
    number = getattr(args, "recompute_num_layers", None)
    if mode == "full" and (method is None or not number):
        yield Problem(
            where="--recompute-method, --recompute-num-layers",
            found=f"{method!r}, {number!r}",
            expected="both with --recompute-granularity full",
            remedy="Such as --recompute-method uniform --recompute-num-layers 1.",
        )
    if mode != "full" and (method is not None or number is not None):
        yield Problem(
            where="--recompute-method, --recompute-num-layers",
            found=f"{method!r}, {number!r}",
            expected="them with --recompute-granularity full only",
            remedy="Remove them, or give --recompute-granularity full.",
        )
    modules = set(getattr(args, "recompute_modules", None) or ())
    if modules - set(RECOMPUTED_MODULES):
        yield Problem(
            where="--recompute-modules",
            found=", ".join(sorted(modules - set(RECOMPUTED_MODULES))),
            expected=f"some of {', '.join(RECOMPUTED_MODULES)}",
            remedy="Remove them: dense layers have no such module.",
        )


def _decided_problems(args: Namespace) -> Iterator[Problem]:
    """What a plan that is to be made decides."""
    for name, neutral in (
        ("pipeline_model_parallel_size", (None, 1)),
        ("pipeline_model_parallel_layout", (None,)),
        ("recompute_granularity", (None,)),
        ("recompute_activations", (None, False)),
    ):
        value = getattr(args, name, None)
        if value not in neutral:
            yield Problem(
                where=spelling_of(name),
                found=_found(value),
                expected="no such flag where a plan is made",
                remedy=DECIDED,
            )


def _hash_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """Stock hashes unsharded parameters between iterations, when sharded chunks have none."""
    interval = getattr(args, "check_weight_hash_across_dp_replicas_interval", None)
    if interval is None or parameters_setting(plan) == RESIDENT:
        return []
    return [
        Problem(
            where="--check-weight-hash-across-dp-replicas-interval",
            found=f"{interval}, while ranks keep shards of the parameters between iterations",
            expected="no such flag, or a plan that keeps parameters resident",
            remedy="Remove the flag: each element has one owner, and the others' copies are "
            "gathered from it in every iteration.",
        )
    ]


def _recompute_problems(args: Namespace, plan: Plan) -> Iterator[Problem]:
    name = recompute_argument(args)
    if name is None:
        return
    settings = ((each.recompute_at, each.settings.recompute) for each in said_settings(plan))
    for where, recompute in dict.fromkeys(settings):
        if recompute is not None:
            yield Problem(
                where=spelling_of(name),
                found=f"{_found(getattr(args, name))}, while {where} says {recompute.mode!r}",
                expected="one of the two to decide",
                remedy="Remove the flag, or the plan's recompute setting.",
            )


def recompute_argument(args: Namespace) -> str | None:
    """The argument that turns recomputation on; None where none does."""
    names = ("recompute_granularity", "recompute_activations")
    return next((name for name in names if getattr(args, name, None)), None)


def _checkpoint_problems(args: Namespace) -> list[Problem]:
    """What would only be refused at the first save, when there is something to lose."""
    stores = args.save is not None or args.load is not None
    if not (stores and args.use_distributed_optimizer):
        return []
    if args.dist_ckpt_optim_fully_reshardable:
        return []
    return [
        Problem(
            where="--use-distributed-optimizer",
            found="no --dist-ckpt-optim-fully-reshardable with it",
            expected="both, where checkpoints are saved or loaded",
            remedy="Add --dist-ckpt-optim-fully-reshardable: stock's other format can only be read "
            "by equal groups of the same number of stages.",
        )
    ]
