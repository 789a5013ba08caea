"""What does not fit together in a model's shape, and what keeps it from tensor-parallel groups."""

from collections.abc import Iterator

from zorse_megatron.errors import Problem
from zorse_megatron.inputs.model import LATENT_FLAG, SHARED_EXPERT_FLAG, Experts, ModelShape


def problems_of(shape: ModelShape, *, has_kv_channels: bool = True) -> Iterator[Problem]:
    """Yield what does not fit together in a shape."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if not has_kv_channels and shape.hidden_size % heads:
        yield Problem(
            where="num_attention_heads",
            found=f"{heads} heads with hidden_size {shape.hidden_size}",
            expected="a number of heads that divides hidden_size",
            remedy="Correct one of them, or give kv_channels.",
        )
    if heads % groups:
        yield Problem(
            where="num_query_groups",
            found=f"{groups} with {heads} query heads",
            expected="a divisor of num_attention_heads",
            remedy="Every key head serves the same number of query heads.",
        )
    if shape.position_embedding == "learned" and shape.max_positions < shape.seq_length:
        yield Problem(
            where="max_positions",
            found=f"{shape.max_positions} with seq_length {shape.seq_length}",
            expected="at least seq_length",
            remedy="Learned positions must reach to the end of a sample.",
        )
    if shape.latent is not None and groups != heads:
        yield Problem(
            where="num_query_groups",
            found=f"{groups} with {heads} query heads and latent attention",
            expected="as many as query heads",
            remedy="Leave it out.",
        )
    if shape.dense_layers and shape.dense_layers[-1] >= shape.num_layers:
        yield Problem(
            where="dense_layers",
            found=f"layer {shape.dense_layers[-1]} of {shape.num_layers}",
            expected="numbers of layers, counted from 0",
            remedy="Correct one of the two.",
        )
    if shape.experts is not None:
        yield from _experts_problems(shape.experts, linear_bias=shape.linear_bias)


def _experts_problems(experts: Experts, *, linear_bias: bool) -> Iterator[Problem]:
    if experts.per_token > experts.num_experts:
        yield Problem(
            where="--moe-router-topk",
            found=f"{experts.per_token} of {experts.num_experts} experts",
            expected="at most as many as there are",
            remedy="Correct one of the two.",
        )
    if experts.per_token == 1 and not experts.scores_all:
        yield Problem(
            where="--moe-router-topk",
            found="1 expert for a token, whose score among the chosen is always 1",
            expected="scores among all experts, as Megatron has them for one",
            remedy="Add --moe-router-pre-softmax.",
        )
    if experts.has_shared_gate and not experts.shared_ffn_hidden_size:
        yield Problem(
            where="--moe-shared-expert-gate",
            found="the gate of a shared expert that is not there",
            expected="it beside --moe-shared-expert-intermediate-size",
            remedy="Add that, or leave the gate out.",
        )
    if experts.shared_ffn_hidden_size and linear_bias:
        yield Problem(
            where=SHARED_EXPERT_FLAG,
            found="a shared expert in a model with biases",
            expected="one without, as Megatron's shared experts have none",
            remedy="Add --disable-bias-linear.",
        )


def flags_barring_tp(shape: ModelShape) -> tuple[str, ...]:
    """Return the flags of what each rank must have whole."""
    has_shared = shape.experts is not None and shape.experts.shared_ffn_hidden_size
    return (SHARED_EXPERT_FLAG,) * bool(has_shared) + (LATENT_FLAG,) * bool(shape.latent)


def tp_problems(shape: ModelShape, where: str, count: int) -> Iterator[Problem]:
    """Yield why the model cannot have tensor-parallel groups of so many ranks."""
    barring = flags_barring_tp(shape)
    if count > 1 and barring:
        yield Problem(
            where=where,
            found=f"{count} ranks of a tensor-parallel group, for a model with "
            f"{' and '.join(_NAMES[flag] for flag in barring)}",
            expected="1: each rank holds them whole",
            remedy="Leave it out; parameters, gradients and state are sharded in groups all the "
            "same.",
        )


_NAMES = {SHARED_EXPERT_FLAG: "shared experts", LATENT_FLAG: "latent attention"}
