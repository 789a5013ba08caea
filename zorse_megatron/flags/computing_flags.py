"""Derive how a training command computes from its flags, and in which types under a plan."""

from argparse import Namespace
from typing import cast

from zorse_megatron.schema.gpus.gpu import Attention, ComputeDtype
from zorse_megatron.schema.model.computing import Computing, JobRecompute, Module
from zorse_megatron.schema.plan.plan import Plan

RECOMPUTED_MODULES = ("core_attn", "mlp", "layernorm")
"""What selective recomputation recomputes in dense layers."""

# Longest samples that the kernels of scaling, mask and softmax in one take: Megatron's
# (`FusedScaleMaskSoftmax.is_kernel_available`), and Transformer Engine's of the same name.
_LONGEST_FUSED_LOCAL, _LONGEST_FUSED = 4096, 16384
_FLASH_BACKENDS = ("flash", "fused")
_UNFUSED_BACKENDS = ("unfused", "local")


def is_mixed(plan: Plan) -> bool:
    """Whether the plan says in which type groups compute."""
    return any(group.compute_dtype is not None for group in plan.groups)


def job_dtype(args: Namespace) -> ComputeDtype:
    """What the command says; on parsed arguments that `set_compute_dtype` has not changed."""
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "fp32"


def compute_dtypes(plan: Plan, job: ComputeDtype) -> tuple[ComputeDtype, ...]:
    """Group -> the type that it computes in."""
    return tuple(group.compute_dtype or job for group in plan.groups)


def recompute_argument(args: Namespace) -> str | None:
    """The argument that turns recomputation on; None where none does."""
    names = ("recompute_granularity", "recompute_activations")
    return next((name for name in names if getattr(args, name, None)), None)


def computing_from_flags(args: Namespace) -> Computing:
    """Return it. `args`: of a command that `flags.check` finds nothing wrong with."""
    is_local = args.transformer_impl == "local"
    is_narrow = args.fp16 and not args.accumulate_allreduce_grads_in_fp32
    return Computing(
        attention=_attention(args, is_local=is_local),
        names_attention=not is_local and args.attention_backend in _FLASH_BACKENDS,
        is_local=is_local,
        softmax_in_fp32=_softmax_in_fp32(args, is_local=is_local),
        hidden_dropout=args.hidden_dropout > 0,
        attention_dropout=args.attention_dropout > 0,
        sequence_parallel=bool(getattr(args, "sequence_parallel", False)),
        narrow_gradients=bool(is_narrow or (args.bf16 and args.grad_reduce_in_bf16)),
        recompute=_recompute(args),
        modules=_modules(args),
    )


def _attention(args: Namespace, *, is_local: bool) -> Attention | None:
    """Megatron's own layers have unfused attention; of Transformer Engine, what it is told.

    `--use-flash-attn` is parsed, but nothing in megatron-core 0.19 reads it.
    """
    if is_local or args.attention_backend in _UNFUSED_BACKENDS:
        return "unfused"
    return "flash" if args.attention_backend in _FLASH_BACKENDS else None


def _softmax_in_fp32(args: Namespace, *, is_local: bool) -> bool:
    """Whether unfused attention has its softmax in fp32 beside 16-bit probabilities.

    Where one kernel does it all, it has not. Transformer Engine asks for fp32 whatever the flags
    say, and fuses whatever they say (`NVTE_MASKED_SOFTMAX_FUSION`).
    """
    tokens = getattr(args, "seq_length", None) or 0
    if not is_local:
        return tokens > _LONGEST_FUSED
    in_fp32 = args.attention_softmax_in_fp32 or args.apply_query_key_layer_scaling
    return bool(in_fp32 and not (args.masked_softmax_fusion and tokens <= _LONGEST_FUSED_LOCAL))


def _recompute(args: Namespace) -> JobRecompute | None:
    """Source: `TransformerConfig.__post_init__` and `megatron.core.recompute`."""
    name = recompute_argument(args)
    if name is None:
        return None
    if name == "recompute_activations" or args.recompute_granularity == "selective":
        return JobRecompute(mode="selective")
    if args.recompute_method == "block":
        return JobRecompute(mode="full", num_layers=args.recompute_num_layers)
    return JobRecompute(mode="full", layers_at_once=args.recompute_num_layers or 1)


def _modules(args: Namespace) -> tuple[Module, ...]:
    given = args.recompute_modules or ["core_attn"]
    return cast(tuple[Module, ...], tuple(each for each in RECOMPUTED_MODULES if each in given))
