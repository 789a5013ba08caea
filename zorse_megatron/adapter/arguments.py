"""Megatron's command line under a plan: what must agree, and what the plan decides.

The user's command stays a stock command. A flag that contradicts the plan is an error, never
overruled in silence (`zorse_megatron.flags` says which do); what the plan decides (stages, layers
per stage, the per-token loss) is set on the parsed arguments. All problems are reported at once.
"""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zorse_megatron.adapter.checkpoint.before_load import load_of
from zorse_megatron.adapter.compute_dtype import set_compute_dtype
from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.flags.command import unknown_problems
from zorse_megatron.flags.conditions import layout_of
from zorse_megatron.flags.model_in_flags import compute_dtypes, is_mixed, job_dtype
from zorse_megatron.flags.table import as_json, defaults
from zorse_megatron.gpus.gpu import GpuKind
from zorse_megatron.inputs.lora import Lora
from zorse_megatron.live.checkpoint_choice import Chooser
from zorse_megatron.log import say
from zorse_megatron.plan.plan import Plan, Recompute, tp_group_of_rank


def argument_hooks(
    plan: Plan,
    *,
    world_size: int,
    kinds: Mapping[str, GpuKind] | None = None,
    lora: Lora | None = None,
) -> Replacements:
    """Return the hooks; apply them before the user's script runs.

    `kinds`: figures of GPUs that only the cluster file has; `lora`: the adapters, where these alone
    are trained.
    """

    fit = partial(fit_to_plan, plan=plan, world_size=world_size, kinds=kinds, lora=lora)
    has_own_heads = any(
        tp_shards is not None and tp_shards.kv_groups is not None
        for group in plan.groups
        for tp_shards in (replica.uneven_tp_shards for replica in group.replicas)
    )
    return {
        **({"check_heads": with_any_heads} if has_own_heads else {}),
        "parse_args": _parsing,
        "validate_args": partial(_validating, plan, world_size, fit),
        "gpu_generation": lambda stock: lambda: max(stock(), 10),
        "print_args": without_defaults,
        "pad_vocabulary": _padding_for_the_command,
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
        shown = len(plan.chunks) * args.tensor_model_parallel_size
        say(
            "Megatron's own lines count one replica per chunk: its 'world size' below is "
            f"{shown}, this job has {world_size} ranks"
        )
        with presented(args, world_size=shown):
            return stock(args, {} if defaults is None else defaults)

    return validate_args


def _padding_for_the_command(stock: Callable[..., int]) -> Callable[..., int]:
    def vocab_size_with_padding(
        orig_vocab_size: int, args: Namespace, logging_enabled: bool = True
    ) -> int:
        with presented(args, tensor_model_parallel_size=args.zorse_command_degree):
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


def fit_to_plan(
    args: Namespace,
    plan: Plan,
    *,
    world_size: int,
    kinds: Mapping[str, GpuKind] | None = None,
    lora: Lora | None = None,
) -> list[str]:
    """Check parsed arguments and set what the plan decides. Returns notes for the user.

    Raises FlagError with every problem.
    """
    if lora is not None:
        args.zorse_lora = lora  # one of ours, which Megatron's parser does not know
    if problems := check_arguments(args, plan, kinds, world_size=world_size):
        raise FlagError("The command does not fit the plan", problems)
    notes = []
    args.global_batch_size = plan.global_batch_size
    args.micro_batch_size = args.micro_batch_size or 1
    args.pipeline_model_parallel_size = len(plan.chunks)
    args.pipeline_model_parallel_layout = layout_of(plan)
    args.zorse_per_token_loss = args.calculate_per_token_loss  # as the command says
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        notes.append(
            "gradients are those of the mean loss over all tokens of the global batch "
            "(--calculate-per-token-loss); unequal micro-batches have no other exact meaning"
        )
    if getattr(args, "overlap_param_gather", False):
        args.overlap_param_gather = False
        notes.append("parameters are gathered where the action list says (no overlap yet)")
    if args.use_distributed_optimizer and (args.save or args.load):
        notes += _set_optimizer_format(args)
    notes += _set_expert_parallelism(args)
    return [*notes, *_set_tp_degree(args, plan), *_dtype_notes(args, plan)]


def _set_expert_parallelism(args: Namespace) -> list[str]:
    """Let experts be where the plan has them, but saved for the command's stock; returns notes."""
    wanted, args.expert_model_parallel_size = args.expert_model_parallel_size, 1
    args.zorse_experts_apart = wanted > 1
    if wanted == 1:
        return []
    return [
        f"experts are on the ranks that the plan says, not --expert-model-parallel-size {wanted}; "
        "checkpoints are those that stock Megatron reads with the flag"
    ]


def _set_optimizer_format(args: Namespace) -> list[str]:
    """Save optimizer state as any other layout can read it; returns notes."""
    if args.dist_ckpt_optim_fully_reshardable:
        return []
    args.dist_ckpt_optim_fully_reshardable = True
    return [
        "optimizer state is saved in a format that any plan or layout can read "
        "(--dist-ckpt-optim-fully-reshardable)"
    ]


def _dtype_notes(args: Namespace, plan: Plan) -> list[str]:
    """What the user should know of the types that groups compute in."""
    notes, dtypes = [], compute_dtypes(plan, job_dtype(args))
    if args.zorse_per_token_loss and "fp16" in dtypes:
        notes.append(
            "--calculate-per-token-loss with fp16: the loss scale is for gradients of a sum over "
            "tokens, as in stock Megatron with this flag; without it, it is for those of a mean, "
            "which have the better range, and the loss is the same"
        )
    if is_mixed(plan):
        listed = ", ".join(f"group {number} {dtype}" for number, dtype in enumerate(dtypes))
        scale = "one loss scale for all" if "fp16" in dtypes else "no loss scale"
        notes.append(f"types to compute in: {listed}; main parameters in fp32, {scale}")
    return notes


def _set_tp_degree(args: Namespace, plan: Plan) -> list[str]:
    """Let this rank's arguments say the degree of its own tensor-parallel group; returns notes.

    The command's own degree stays in `args.zorse_command_degree`: the vocabulary is padded for it.
    """
    args.zorse_command_degree = wanted = args.tensor_model_parallel_size
    args.tensor_model_parallel_size = len(tp_group_of_rank(plan, args.rank))
    degrees = {replica.tp_degree for group in plan.groups for replica in group.replicas}
    notes = []
    if degrees != {wanted}:
        found = " or ".join(map(str, sorted(degrees)))
        notes.append(
            f"tensor parallelism is the plan's: {found}"
            + ("" if wanted == 1 else f", not --tensor-model-parallel-size {wanted}")
        )
    if degrees != {1}:
        # Their number depends on the degree. Without dropout nothing draws from them.
        args.no_save_rng = args.no_load_rng = True
    return notes


# Which arguments a run prints at its start: those that say something about it.


def without_defaults(stock: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Wrap stock's `_print_args`, which prints 800 lines, nine in ten of them defaults."""

    def _print_args(title: str, args: Any) -> None:
        level = args.logging_level or int(os.environ.get("MEGATRON_LOGGING_LEVEL", logging.INFO))
        usual = defaults() if level >= logging.INFO else {}
        unusual = {
            name: value
            for name, value in vars(args).items()
            if name not in usual or as_json(value) != usual[name]
        }
        stock(title, Namespace(**unusual))
        if num_left := len(vars(args)) - len(unusual):
            say(f"{num_left} more arguments have their defaults; --logging-level 10 prints all")

    return _print_args


# A group's recompute setting as Megatron's transformer config has it.


_ALL_LAYERS = 1_000_000


def set_recompute(transformer_config: Any, recompute: Recompute) -> None:
    """Set what `--recompute-granularity` and its companions set, for the layers of one group.

    "full" is Megatron's method "block": the first layers of each chunk are recomputed, one at a
    time, and keep their input only. Source: `TransformerConfig.__post_init__` and
    `megatron.core.recompute.checkpointed_forward`.
    """
    transformer_config.recompute_granularity = None if recompute.mode == "none" else recompute.mode
    transformer_config.recompute_method = None
    transformer_config.recompute_num_layers = None
    if recompute.mode == "selective":
        transformer_config.recompute_modules = ["core_attn"]
    elif recompute.mode == "full":
        transformer_config.recompute_method = "block"
        transformer_config.recompute_num_layers = recompute.num_layers or _ALL_LAYERS


# Numbers of heads that the ranks of a tensor-parallel group do not divide.


def with_any_heads(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `TransformerConfig.__post_init__`, which the whole model's heads need not pass."""

    def post_init(self: Any) -> None:
        degree, heads = self.tensor_model_parallel_size, self.num_attention_heads
        groups = self.num_query_groups or heads
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // heads
        self.num_attention_heads, self.num_query_groups = heads * degree, groups * degree
        try:
            stock(self)
        finally:
            self.num_attention_heads, self.num_query_groups = heads, groups

    return post_init
