"""The model, and how it is computed, from Megatron's command line, without importing Megatron.

Only flags that the shape depends on are read; all others are left to Megatron, which checks them
again. Names and defaults are those of megatron-core 0.19 (`megatron/training/arguments.py`).
"""

import ast
import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Literal, cast

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.table import spelling_of
from zorse_megatron.flags.tokenizers import NotReadable, tokens_of
from zorse_megatron.gpus.gpu import Attention, ComputeDtype
from zorse_megatron.inputs.model import (
    Activation,
    Computing,
    Experts,
    JobRecompute,
    LatentAttention,
    ModelShape,
    Module,
    PositionEmbedding,
    default_ffn_hidden_size,
    padded_vocab_size,
)
from zorse_megatron.inputs.model_rules import problems_of, tp_problems
from zorse_megatron.live.batch_schedule import BatchSchedule
from zorse_megatron.plan.plan import Plan

_LIMIT = 10**9
_POSITIONS: dict[str, PositionEmbedding] = {
    "learned_absolute": "learned",
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "none": "none",
}
# Models of other layers.
_UNSUPPORTED = (
    "mtp_num_layers",
    "heterogeneous_layers_config_path",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "spec",
)
_BATCH = "the batch of these Megatron flags cannot be planned"


class _Flags:
    """A command, and all that is wrong with it: what its parser says, and its model."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = read_command(arguments)
        self.args, self.given = command.args, command.given
        self.problems = list(command.problems)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; without one the problem is noted and 1 returned."""
        value = getattr(self.args, name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or not 0 < value < _LIMIT:
            self.add(name, "no value" if value is None else f'"{value}"', "a positive integer")
            return 1
        return value

    def add(self, name: str, found: str, expected: str, remedy: str | None = None) -> None:
        """Note a problem, unless the parser has one with this flag."""
        flag = spelling_of(name)
        remedy = remedy or f"Add {flag}, or give the model with --model."
        if flag not in {each.where for each in self.problems}:
            problem = Problem(where=flag, found=found, expected=expected, remedy=remedy)
            self.problems.append(problem)


def shape_from_flags(arguments: Sequence[str], *, tensor_parallel: int = 1) -> ModelShape:
    """Return the model that a Megatron command trains. Raises ModelError with every problem."""
    flags = _Flags(arguments)
    shape = _shape(flags, tensor_parallel)
    for name in _UNSUPPORTED:
        if name in flags.given:
            remedy = "Only GPT models of Megatron's usual layers can be planned; remove the flag."
            flags.add(name, "the flag", "a model without it", remedy)
    flags.problems += tp_problems(shape, "--tensor-model-parallel-size", tensor_parallel)
    if not flags.problems:
        flags.problems += problems_of(shape, has_kv_channels="kv_channels" in flags.given)
    if flags.problems:
        raise ModelError("the model of these Megatron flags cannot be planned", flags.problems)
    return shape


def batch_size_from_flags(arguments: Sequence[str]) -> int | None:
    """Return the global batch size of a Megatron command; None where it is not given.

    Of batches that change it is the largest. Raises ModelError where it is no positive integer.
    """
    flags = _Flags(arguments)
    schedule = "step_batch_size_schedule"
    size = None
    if "global_batch_size" in flags.given:
        size = flags.integer("global_batch_size")
    elif schedule in flags.given:
        text = flags.args.step_batch_size_schedule
        try:
            size = BatchSchedule.parse(text or "", sequence_length=1).sizes[-1]
        except ValueError:
            expected = "TOKENS:SAMPLES ..., the first from 0 on"
            flags.add(schedule, f'"{text}"', expected, "Such as '0:256 10B:512'.")
    if flags.problems:
        raise ModelError(_BATCH, flags.problems)
    return size


def _shape(flags: _Flags, tensor_parallel: int) -> ModelShape:
    args = flags.args
    hidden, heads = flags.integer("hidden_size"), flags.integer("num_attention_heads")
    sequence = flags.integer("seq_length")
    activation, position = _activation(args), _position(flags)
    ffn = flags.integer("ffn_hidden_size", default_ffn_hidden_size(hidden, activation))
    has_groups, is_learned = args.group_query_attention, position == "learned"
    num_layers = flags.integer("num_layers")
    return ModelShape(
        name="megatron flags",
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=flags.integer("num_query_groups") if has_groups else heads,
        kv_channels=flags.integer("kv_channels", max(1, hidden // heads)),
        vocab_size=_vocab_size(flags, tensor_parallel),
        seq_length=sequence,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        activation=activation,
        norm="rmsnorm" if args.normalization == "RMSNorm" else "layernorm",
        position_embedding=position,
        max_positions=flags.integer("max_position_embeddings") if is_learned else 0,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias and not args.add_bias_linear,
        qk_norm=args.qk_layernorm,
        experts=_experts(flags, ffn),
        latent=_latent(flags),
        dense_layers=_dense_layers(flags, num_layers),
    )


def layers_with_experts(frequency: Any, num_layers: int) -> tuple[Literal[0, 1], ...]:
    """Return for each layer whether it has experts, by a --moe-layer-freq.

    That is a number, every so many layers from the first on, or a list, or a sum of lists and of
    multiples of them, as the flag has it or as Megatron's parser returns it. Raises ValueError
    where it is none, or not of so many layers.

    >>> layers_with_experts("([0]*2+[1]*3)", 5), layers_with_experts(2, 5)
    ((0, 0, 1, 1, 1), (1, 0, 1, 0, 1))
    """
    try:
        if isinstance(frequency, str) and "[" in frequency:
            if set(frequency) - _OF_LISTS:  # which Megatron's parser refuses
                raise ValueError(f"no list: {frequency}")
            frequency = _evaluated(ast.parse(frequency, mode="eval").body, num_layers)
        elif not isinstance(frequency, list):
            if (step := int(frequency)) < 1:
                raise ValueError(f"no number of layers: {step}")
            frequency = [int(layer % step == 0) for layer in range(num_layers)]
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"neither a list nor a number: {frequency}") from error
    if len(frequency) != num_layers or not all(each in {0, 1} for each in frequency):
        raise ValueError(f"not one of 0 and 1 for each of {num_layers} layers: {frequency}")
    return tuple(1 if each else 0 for each in frequency)


_OF_LISTS = frozenset("0123456789,[]()+*")


def _evaluated(node: ast.expr, longest: int) -> Any:
    """The value of integers and lists of them, added and multiplied; no list may be longer."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.List(elts=elements):
            return tuple(_evaluated(each, longest) for each in elements)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult(), right=right):
            one, other = _evaluated(left, longest), _evaluated(right, longest)
            try:
                if isinstance(node.op, ast.Add):
                    return one + other
                sizes = [len(each) if isinstance(each, tuple) else each for each in (one, other)]
                if math.prod(sizes) > longest:
                    raise ValueError(f"more than {longest} layers")
                return one * other
            except TypeError as error:
                raise ValueError("lists can be added, and multiplied by integers") from error
    raise ValueError(f"neither an integer nor a list: {ast.unparse(node)}")


def _dense_layers(flags: _Flags, num_layers: int) -> tuple[int, ...]:
    """Those without experts, in a model whose other layers have some."""
    args = flags.args
    if not args.num_experts:
        return ()
    try:
        found = layers_with_experts(args.moe_layer_freq, num_layers)
    except ValueError:
        expected = f"a number, or a list such as ([0]*1+[1]*{max(1, num_layers - 1)})"
        flags.add("moe_layer_freq", f'"{args.moe_layer_freq}"', expected, "Correct it.")
        return ()
    if not any(found):
        remedy = "Leave out --num-experts, or give some layers experts."
        flags.add("moe_layer_freq", f'"{args.moe_layer_freq}"', "layers with experts", remedy)
    return tuple(layer for layer, has_experts in enumerate(found) if not has_experts)


def _experts(flags: _Flags, ffn_hidden_size: int) -> Experts | None:
    """Those of layers that have some; as in Megatron, 0 of them are none."""
    args, shared = flags.args, "moe_shared_expert_intermediate_size"
    if not args.num_experts:
        return None
    return Experts(
        num_experts=flags.integer("num_experts"),
        per_token=flags.integer("moe_router_topk"),
        ffn_hidden_size=flags.integer("moe_ffn_hidden_size", ffn_hidden_size),
        shared_ffn_hidden_size=flags.integer(shared) if shared in flags.given else 0,
        has_shared_gate=args.moe_shared_expert_gate,
        scores_all=args.moe_router_pre_softmax or args.moe_router_score_function != "softmax",
    )


def _latent(flags: _Flags) -> LatentAttention | None:
    """What --multi-latent-attention has; queries without a rank come from the residual stream."""
    if not flags.args.multi_latent_attention:
        return None
    return LatentAttention(
        kv_lora_rank=flags.integer("kv_lora_rank"),
        q_lora_rank=flags.integer("q_lora_rank") if "q_lora_rank" in flags.given else 0,
        qk_head_dim=flags.integer("qk_head_dim"),
        qk_pos_emb_head_dim=flags.integer("qk_pos_emb_head_dim"),
        v_head_dim=flags.integer("v_head_dim"),
    )


def _activation(args: Namespace) -> Activation:
    if args.swiglu:
        return "swiglu"
    if args.squared_relu:
        return "squared_relu"
    return "geglu" if args.quick_geglu else "gelu"


def _position(flags: _Flags) -> PositionEmbedding:
    args, name = flags.args, "position_embedding_type"
    if args.use_rotary_position_embeddings:
        return "rope"
    if args.position_embedding_type not in _POSITIONS:
        found = f'"{args.position_embedding_type}"'
        flags.add(name, found, f"one of {', '.join(_POSITIONS)}")
        return "learned"
    return _POSITIONS[args.position_embedding_type]


def _vocab_size(flags: _Flags, tensor_parallel: int) -> int:
    if "padded_vocab_size" in flags.given:
        return flags.integer("padded_vocab_size")
    try:
        size, reason = tokens_of(flags.args), "no tokenizer"
    except NotReadable as error:
        size, reason = None, str(error)
    if size is None and "vocab_size" not in flags.given:
        found = f"no such flag, and {reason}"
        remedy = "Add it, or --padded-vocab-size, or a tokenizer whose files are here."
        flags.add("vocab_size", found, "the number of tokens", remedy)
        return 1
    return padded_vocab_size(
        size or flags.integer("vocab_size"),
        divisible_by=flags.integer("make_vocab_size_divisible_by"),
        tensor_parallel=tensor_parallel,
    )


# Derive how a training command computes from its flags, and in which types under a plan.


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
        sample_block=_sample_block(args),
        needs_loads_in_order=needs_loads_in_order(args),
        are_packed=packs_samples(args),
        has_auxiliary_loss=any(auxiliary_losses(args).values()),
        router_bytes=router_bytes(args),
        lora=getattr(args, "zorse_lora", None),
    )


def auxiliary_losses(args: Namespace) -> dict[str, float]:
    """Kind -> its weight, of losses that balance experts; none in models without them."""
    if not getattr(args, "num_experts", None):
        return {}
    kinds, weights = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    kinds, weights = (each if isinstance(each, list) else [each] for each in (kinds, weights))
    pairs = zip(kinds, weights, strict=False)  # Megatron says it where their numbers differ
    return {kind: weight for kind, weight in pairs if kind.endswith("aux_loss")}


def router_bytes(args: Namespace) -> int:
    """Of a score of an expert; 0: as all activations."""
    return {"fp32": 4, "fp64": 8}.get(getattr(args, "moe_router_dtype", None) or "", 0)


def _sample_block(args: Namespace) -> int:
    return (args.micro_batch_size or 1) if has_block_loss(args) else 1


def has_block_loss(args: Namespace) -> bool:
    """Whether stock takes a loss over the samples of a micro-batch; others are by sample."""
    return bool(auxiliary_losses(args).get("aux_loss")) or needs_loads_in_order(args)


def packs_samples(args: Namespace) -> bool:
    """Whether the samples of a micro-batch are one sequence."""
    names = ("sft", "dataloader_inter_document_masking")
    return any(getattr(args, name, False) for name in names)


def needs_loads_in_order(args: Namespace) -> bool:
    """Whether a loss of each micro-batch has the loads of all that come before."""
    return bool(auxiliary_losses(args).get("global_aux_loss"))


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
