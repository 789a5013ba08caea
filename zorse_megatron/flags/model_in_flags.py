"""The model, and how it is computed, from Megatron's command line, without importing Megatron.

Only flags that the shape depends on are read; all others are left to Megatron, which checks them
again. Names and defaults are those of megatron-core 0.19 (`megatron/training/arguments.py`).
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.flags.command import last_values, read_command
from zorse_megatron.flags.table import by_spelling
from zorse_megatron.flags.tokenizers import NotReadable, tokens_of
from zorse_megatron.gpus.gpu import Attention, ComputeDtype, Dtype
from zorse_megatron.inputs.model import (
    NUM_EXPERTS_FLAG,
    USUAL_DIVISOR,
    Activation,
    Computing,
    Experts,
    JobRecompute,
    ModelShape,
    Module,
    PositionEmbedding,
    default_ffn_hidden_size,
    no_tp_with_experts,
    padded_vocab_size,
    problems_of,
)
from zorse_megatron.live.batch_schedule import BatchSchedule
from zorse_megatron.plan.plan import Plan

_DIGITS = 9
_USUAL_TOP_K = 2  # Megatron's
_POSITIONS: dict[str, PositionEmbedding] = {
    "learned_absolute": "learned",
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "none": "none",
}
_NORMS = ("LayerNorm", "RMSNorm")
# Models that are not a row of equal layers.
_UNSUPPORTED = (
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--heterogeneous-layers-config-path",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--spec",
)


@dataclass(kw_only=True)
class _Flags:
    """The flags of a command, and what is wrong with those that were asked for."""

    values: Mapping[str, str | None]
    args: Namespace
    """The same as Megatron's parser has them, with its defaults."""
    problems: list[Problem] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return flag in self.values

    def integer(self, flag: str, default: int | None = None) -> int:
        """Return a positive integer; without one the problem is noted and 1 returned."""
        text = self.values.get(flag)
        if text is not None and text.isdecimal() and len(text) <= _DIGITS and int(text) > 0:
            return int(text)
        if flag not in self.values and default is not None:
            return default
        self.add(flag, "no value" if text is None else f'"{text}"', "a positive integer")
        return 1

    def choice(self, flag: str, default: str, known: Sequence[str]) -> str:
        """Return one of the known values."""
        text = self.values.get(flag, default)
        if text in known:
            return str(text)
        self.add(flag, "no value" if text is None else f'"{text}"', f"one of {', '.join(known)}")
        return default

    def add(self, flag: str, found: str, expected: str, remedy: str | None = None) -> None:
        """Note a problem."""
        remedy = remedy or f"Add {flag}, or give the model with --model."
        self.problems.append(Problem(where=flag, found=found, expected=expected, remedy=remedy))


def shape_from_flags(arguments: Sequence[str], *, tensor_parallel: int = 1) -> ModelShape:
    """Return the model that a Megatron command trains. Raises ModelError with every problem."""
    flags = _flags(arguments)
    shape = _shape(flags, tensor_parallel)
    for flag in _UNSUPPORTED:
        if flags.has(flag):
            remedy = "Only GPT models of equal layers can be planned; remove the flag."
            flags.add(flag, "the flag", "a model without it", remedy)
    if shape.experts is not None and tensor_parallel > 1:
        flags.problems.append(
            no_tp_with_experts("--tensor-model-parallel-size", str(tensor_parallel))
        )
    if not flags.problems:
        flags.problems += problems_of(shape, has_kv_channels=flags.has("--kv-channels"))
    if flags.problems:
        raise ModelError("the model of these Megatron flags cannot be planned", flags.problems)
    return shape


def dtype_from_flags(arguments: Sequence[str]) -> Dtype:
    """Return the type of number that a Megatron command computes in."""
    given = last_values(arguments, ["--bf16", "--fp16"])
    if "--bf16" in given:
        return "bfloat16"
    return "float16" if "--fp16" in given else "float32"


def batch_size_from_flags(arguments: Sequence[str]) -> int | None:
    """Return the global batch size of a Megatron command; None where it is not given.

    Of batches that change it is the largest. Raises ModelError where it is no positive integer.
    """
    flags = _flags(arguments)
    if flags.has("--step-batch-size-schedule") and not flags.has("--global-batch-size"):
        return _largest_batch(flags)
    if not flags.has("--global-batch-size"):
        return None
    size = flags.integer("--global-batch-size")
    if flags.problems:
        raise ModelError("the batch of these Megatron flags cannot be planned", flags.problems)
    return size


def _largest_batch(flags: _Flags) -> int:
    text = flags.values["--step-batch-size-schedule"]
    try:
        return BatchSchedule.parse(text or "", sequence_length=1).sizes[-1]
    except ValueError:
        flag, found = "--step-batch-size-schedule", "no value" if text is None else f'"{text}"'
        flags.add(
            flag, found, "TOKENS:SAMPLES ..., the first from 0 on", "Such as '0:256 10B:512'."
        )
        raise ModelError(
            "the batch of these Megatron flags cannot be planned", flags.problems
        ) from None


def _flags(arguments: Sequence[str]) -> _Flags:
    args = read_command(arguments).args
    return _Flags(values=last_values(arguments, by_spelling()), args=args)


def _shape(flags: _Flags, tensor_parallel: int) -> ModelShape:
    hidden = flags.integer("--hidden-size")
    heads = flags.integer("--num-attention-heads")
    sequence = flags.integer("--seq-length")
    activation, position = _activation(flags), _position(flags)
    has_groups = flags.has("--group-query-attention")
    is_learned = position == "learned"
    bias = not flags.has("--disable-bias-linear")
    ffn = flags.integer("--ffn-hidden-size", default_ffn_hidden_size(hidden, activation))
    return ModelShape(
        name="megatron flags",
        num_layers=flags.integer("--num-layers"),
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=flags.integer("--num-query-groups", 1) if has_groups else heads,
        kv_channels=flags.integer("--kv-channels", max(1, hidden // heads)),
        vocab_size=_vocab_size(flags, tensor_parallel),
        seq_length=sequence,
        tied_embeddings=not flags.has("--untie-embeddings-and-output-weights"),
        activation=activation,
        norm="rmsnorm"
        if flags.choice("--normalization", "LayerNorm", _NORMS) == "RMSNorm"
        else "layernorm",
        position_embedding=position,
        max_positions=flags.integer("--max-position-embeddings") if is_learned else 0,
        linear_bias=bias,
        qkv_bias=flags.has("--add-qkv-bias") and not bias,
        qk_norm=flags.has("--qk-layernorm"),
        experts=_experts(flags, ffn),
    )


def layer_kinds(frequency: str) -> set[str]:
    """Return what --moe-layer-freq has: of ones alone all layers have experts.

    >>> sorted(layer_kinds("([0]*2+[1]*6)")), layer_kinds("1")
    (['0', '1'], {'1'})
    """
    lists = "".join(re.findall(r"\[[^]]*\]", frequency))
    return set(re.findall(r"\d+", lists or frequency))


def _experts(flags: _Flags, ffn_hidden_size: int) -> Experts | None:
    """Those of all layers; as in Megatron, 0 of them are none."""
    if not flags.has(NUM_EXPERTS_FLAG) or flags.values[NUM_EXPERTS_FLAG] == "0":
        return None
    shared, frequency = "--moe-shared-expert-intermediate-size", "--moe-layer-freq"
    layers = flags.values.get(frequency, "1") or ""
    if layer_kinds(layers) != {"1"}:
        expected = "1, or as many ones as there are layers: all of them with experts"
        remedy = "Layers of two kinds train under a plan that is written by hand, but none is made."
        flags.add(frequency, f'"{layers}"', expected, remedy)
    is_softmax = flags.values.get("--moe-router-score-function", "softmax") == "softmax"
    return Experts(
        num_experts=flags.integer(NUM_EXPERTS_FLAG),
        per_token=flags.integer("--moe-router-topk", _USUAL_TOP_K),
        ffn_hidden_size=flags.integer("--moe-ffn-hidden-size", ffn_hidden_size),
        shared_ffn_hidden_size=flags.integer(shared) if flags.has(shared) else 0,
        has_shared_gate=flags.has("--moe-shared-expert-gate"),
        scores_all=flags.has("--moe-router-pre-softmax") or not is_softmax,
    )


def _activation(flags: _Flags) -> Activation:
    if flags.has("--swiglu"):
        return "swiglu"
    if flags.has("--squared-relu"):
        return "squared_relu"
    return "geglu" if flags.has("--quick-geglu") else "gelu"


def _position(flags: _Flags) -> PositionEmbedding:
    if flags.has("--use-rotary-position-embeddings"):
        return "rope"
    chosen = flags.choice("--position-embedding-type", "learned_absolute", list(_POSITIONS))
    return _POSITIONS[chosen]


def _vocab_size(flags: _Flags, tensor_parallel: int) -> int:
    if flags.has("--padded-vocab-size"):
        return flags.integer("--padded-vocab-size")
    try:
        size, reason = tokens_of(flags.args), "no tokenizer"
    except NotReadable as error:
        size, reason = None, str(error)
    if size is None and not flags.has("--vocab-size"):
        found = f"no such flag, and {reason}"
        remedy = "Add it, or --padded-vocab-size, or a tokenizer whose files are here."
        flags.add("--vocab-size", found, "the number of tokens", remedy)
        return 1
    return padded_vocab_size(
        size or flags.integer("--vocab-size"),
        divisible_by=flags.integer("--make-vocab-size-divisible-by", USUAL_DIVISOR),
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
    """Stock takes this loss over the samples of a micro-batch; the others by sample or by step."""
    return (args.micro_batch_size or 1) if auxiliary_losses(args).get("aux_loss") else 1


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
