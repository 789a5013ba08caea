"""Hooks into argument parsing: flags are compared with the plan, and set by it, once."""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zorse_megatron.adapter.arguments.compute_dtype import set_compute_dtype
from zorse_megatron.adapter.arguments.plan_arguments import fit_to_plan
from zorse_megatron.adapter.arguments.printed_arguments import without_defaults
from zorse_megatron.adapter.arguments.unequal_heads import with_any_heads
from zorse_megatron.adapter.checkpoint.check_before_load import load_of
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.patches import under_plan
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.checkpoints.choice import Chooser
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.command import unknown_problems
from zorse_megatron.log import say
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.plan.plan import Plan


def argument_hooks(
    plan: Plan, *, world_size: int, kinds: Mapping[str, GpuKind] | None = None
) -> Replacements:
    """Return the hooks; apply them before the user's script runs.

    `kinds`: figures of GPUs that only the cluster file has.
    """

    fit = partial(fit_to_plan, plan=plan, world_size=world_size, kinds=kinds)
    has_own_heads = any(
        parts is not None and parts.kv_groups is not None
        for group in plan.groups
        for parts in (replica.unequal_parts for replica in group.replicas)
    )
    return {
        **({under_plan.CHECK_HEADS: with_any_heads} if has_own_heads else {}),
        under_plan.PARSE_ARGS: _parsing,
        under_plan.VALIDATE_ARGS: partial(_validating, plan, world_size, fit),
        under_plan.PRINT_ARGS: without_defaults,
        under_plan.PAD_VOCABULARY: _padding_for_the_command,
    }


Fit = Callable[[Namespace], list[str]]
"""Compares arguments with the plan, sets what it decides, and returns what is to be said."""


def _parsing(stock: Callable[..., Namespace]) -> Callable[..., Namespace]:
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Namespace:
        extra = extra_args_provider
        if not ignore_unknown_args:
            extra = partial(_with_known_flags, extra_args_provider)
        args = stock(extra, ignore_unknown_args)
        # Stock reads the checkpoint's arguments before there are groups of ranks.
        load = load_of(args, skips_damaged=False) if args.use_checkpoint_args else None
        if load is not None:
            Chooser(load).choose()  # by names and sizes, on this rank alone
        return args

    return parse_args


def _validating(
    plan: Plan, world_size: int, fit: Fit, stock: Callable[..., Any]
) -> Callable[..., Any]:
    def validate_args(args: Namespace, defaults: Any = None) -> Any:
        # Not when they are parsed: --use-checkpoint-args sets arguments in between.
        for note in fit(args):
            say(note)
        set_compute_dtype(args, plan)
        # One rank per stage: then stock's grid arithmetic is that of one replica that takes
        # the whole global batch, which is what a plan's groups are to the training loop.
        args.world_size = len(plan.chunks) * args.tensor_model_parallel_size
        say(
            "Megatron's own lines count one replica per chunk: its 'world size' below is "
            f"{args.world_size}, this job has {world_size} ranks"
        )
        try:
            return stock(args, {} if defaults is None else defaults)
        finally:
            args.world_size = world_size

    return validate_args


def _padding_for_the_command(stock: Callable[..., int]) -> Callable[..., int]:
    def vocab_size_with_padding(
        orig_vocab_size: int, args: Namespace, logging_enabled: bool = True
    ) -> int:
        with presented(args, "tensor_model_parallel_size", args.zorse_command_degree):
            return stock(orig_vocab_size, args, logging_enabled)

    return vocab_size_with_padding


def _with_known_flags(extra: Callable[[Any], Any] | None, parser: Any) -> Any:
    """The parser with the script's own flags, once it knows all that are given.

    Without a check argparse would print its usage, a thousand lines of it, on every rank.
    """
    parser = parser if extra is None else extra(parser)
    known = [spelling for action in parser._actions for spelling in action.option_strings]
    problems = unknown_problems(sys.argv[1:], known)
    if problems:
        raise FlagError("The command has unknown flags", problems)
    return parser
