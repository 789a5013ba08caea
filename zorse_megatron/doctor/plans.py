"""A small GPT, and the plans under which it must train as stock Megatron, or as one rank, does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_WORKERS
from zorse_megatron.inputs.lora import LORA_FLAG
from zorse_megatron.launch.rank_environment import MOST_QUEUES
from zorse_megatron.plan.plan import (
    Chunk,
    ClusterFingerprint,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
    TpShards,
)

ITERATIONS, SAVE_EVERY = 3, 2
# Fused accumulation, where Apex is installed, leaves no weight gradients to compute apart.
FP32_FLAGS = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "96", "--swiglu"),
    *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--disable-bias-linear", "--moe-router-dtype", "fp64"),
)
# Of the loss scale: so low that no step is skipped.
SIXTEEN_BIT_FLAGS = ("--bf16", "--initial-loss-scale", "16", "--transformer-impl", "local")
MAX_ABS_LOSS_DIFFERENCE = 2e-5
"""fp32 sums in another order move a loss of about 5 by up to 1e-6 an iteration (measured between
stock's own layouts: 9.5e-7 over 20 iterations); a wrong scale or a lost sample moves it by 1e-3 or
more."""
EXACT = {"abs_loss": MAX_ABS_LOSS_DIFFERENCE, "relative_grad_norm": 1e-4}
"""How far a plan may be from stock; sums in another order move both a little."""
WITHIN_ROUNDING = {"relative_loss": 2**-8}
"""Losses within one rounding to bf16, as tests/megatron/test_mixed_precision.py has it."""


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A plan of the small GPT, and what it and its reference are trained with."""

    name: str
    plan: Plan
    flags: tuple[str, ...] = FP32_FLAGS
    reference: Plan | None = None
    """None: stock on one rank."""
    limits: Mapping[str, float] = field(default_factory=lambda: EXACT)
    queues: int = MOST_QUEUES
    """CUDA_DEVICE_MAX_CONNECTIONS: in how many hardware queues a GPU takes its work."""


def replica(rank: int, size: int, count: int, weight: float = 1.0) -> Replica:
    """Return one of a single rank."""
    return Replica(
        ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=weight
    )


def in_host(group: Group) -> Group:
    """Return it with all that can wait in host memory there."""
    everything = Offload(parameters=True, gradients=True, optimizer_state=True, activations=True)
    return replace(group, recompute=Recompute(mode="full"), offload=everything)


def with_split_backward(plan: Plan) -> Plan:
    """With weight gradients apart from backwards in all groups."""
    groups = tuple(replace(group, split_backward=True) for group in plan.groups)
    return replace(plan, groups=groups)


ONE_F_ONE_B = Schedule(name="1f1b")


def plan_of(groups: Sequence[Group], spans: Sequence[tuple[int, int]], schedule: Schedule) -> Plan:
    """Return a plan. `spans`: (group, layers) of each chunk in the order of the model."""
    chunks, first = [], 0
    for group, layers in spans:
        chunks.append(Chunk(group=group, layers=(first, first + layers)))
        first += layers
    return Plan(
        schema_version=2,
        global_batch_size=sum(each.num_samples for each in groups[0].replicas),
        model=ModelFingerprint(num_layers=first),
        groups=tuple(groups),
        chunks=tuple(chunks),
        schedule=schedule,
    )


UNEVEN_PLAN = replace(
    plan_of(
        (
            Group(name="front", replicas=(replica(0, 4, 4, 3.0), replica(1, 2, 4))),
            Group(name="middle", replicas=(replica(2, 3, 8),)),
            Group(name="back", replicas=(replica(3, 3, 6, 2.0), replica(4, 2, 3, 3.0))),
        ),
        ((0, 3), (1, 1), (2, 2)),
        ONE_F_ONE_B,
    ),
    model=ModelFingerprint(
        num_layers=6, hidden_size=96, num_attention_heads=4, seq_length=64, tied_embeddings=True
    ),
    cluster=ClusterFingerprint(name="five processes on one machine's CPU"),
)
"""Groups of 2, 1 and 2 ranks; sizes, counts, layers and shards of state are all unequal."""
INTERLEAVED = plan_of(
    (
        Group(replicas=(replica(0, 2, 8, 3.0), replica(1, 2, 4))),
        Group(replicas=(replica(2, 3, 8),)),
    ),
    ((0, 1), (1, 2), (0, 2), (1, 1)),
    Schedule(name="interleaved"),
)
BREADTH_FIRST = replace(
    INTERLEAVED,
    groups=tuple(map(in_host, INTERLEAVED.groups)),
    schedule=Schedule(name="breadth_first", parameters={"parameters": "per_pass"}),
)
MIXED = plan_of(
    (
        Group(replicas=(replica(1, 3, 8),), compute_dtype="bf16"),
        Group(replicas=(replica(0, 2, 12),), compute_dtype="fp16"),
    ),
    ((0, 4), (1, 2)),
    ONE_F_ONE_B,
)


def of_tensor_parallel_pairs(front: TpShards | None, back: TpShards | None) -> Plan:
    """Two groups, each of two ranks that have these parts of every layer; None: equal ones."""
    pairs = (
        replace(replica(0, 4, 6), ranks=(0, 1), tp_shards=front),
        replace(replica(2, 3, 8), ranks=(2, 3), tp_shards=back),
    )
    return plan_of([Group(replicas=(pair,)) for pair in pairs], ((0, 4), (1, 2)), ONE_F_ONE_B)


EQUAL_PARTS = of_tensor_parallel_pairs(None, None)
UNEQUAL_PARTS = of_tensor_parallel_pairs(
    TpShards(kv_groups=(1, 3), mlp_columns=(96, 288)),
    TpShards(kv_groups=(3, 1), mlp_columns=(256, 128)),
)
TWO_LEVELS = plan_of(
    (
        Group(
            replicas=(
                replace(replica(0, 2, 5, 3.0), region="east"),
                replace(replica(1, 3, 2), region="east"),
                replace(replica(2, 4, 2, 2.0), region="west"),
            ),
            hierarchical=True,
        ),
        Group(replicas=(replica(3, 4, 6),)),
    ),
    ((0, 4), (1, 2)),
    ONE_F_ONE_B,
)
ONE_RANK = plan_of((Group(replicas=(replica(0, 4, 6),)),), ((0, 6),), ONE_F_ONE_B)
CASES = (
    PlanCase(name="2|1|2", plan=UNEVEN_PLAN),
    PlanCase(name="tensor-parallel groups, equal parts", plan=EQUAL_PARTS),
    PlanCase(name="tensor-parallel groups, unequal parts", plan=UNEQUAL_PARTS),
    PlanCase(name="sums in two levels, two ranks and one", plan=TWO_LEVELS),
    PlanCase(name="interleaved, weight gradients apart", plan=with_split_backward(INTERLEAVED)),
    PlanCase(name="interleaved, one hardware queue", plan=INTERLEAVED, queues=1),
    PlanCase(name="breadth-first, all offloaded", plan=BREADTH_FIRST),
    PlanCase(
        name="adapters, all offloaded",
        plan=BREADTH_FIRST,
        flags=(*FP32_FLAGS, LORA_FLAG, "rank=8,alpha=16,targets=q,k,v,o,up,down"),
        reference=ONE_RANK,  # stock has no adapters
    ),
    PlanCase(name="experts", plan=INTERLEAVED, flags=(*FP32_FLAGS, *EXPERTS)),
    PlanCase(
        name="bf16 and fp16 groups", plan=MIXED, flags=SIXTEEN_BIT_FLAGS, limits=WITHIN_ROUNDING
    ),
)


def gpt_flags(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Megatron's flags of a GPT without dropout; those of precision and data are missing."""
    usual: dict[str, object] = {
        "--max-position-embeddings": flags["--seq-length"],
        "--lr-decay-style": "cosine",
        "--weight-decay": 0.1,
        "--clip-grad": 1.0,
        "--log-interval": 1,
        "--seed": 1234,
    }
    words = (str(word) for pair in {**usual, **flags}.items() for word in pair)
    return (*words, *WITHOUT_WORKERS, *WITHOUT_DROPOUT)


SMALL_GPT = (
    *gpt_flags(
        {
            "--num-layers": 6,
            "--hidden-size": 96,
            "--num-attention-heads": 4,
            "--seq-length": 64,
            "--micro-batch-size": 4,
            "--global-batch-size": 24,
            "--train-iters": ITERATIONS,
            # Rounding errors do not grow: at 2e-3 two of stock's own layouts are 1e-3 apart after
            # 30 iterations, at 1e-3 they stay within 5e-7 (measured on this model).
            "--lr": 1e-3,
            "--min-lr": 1e-4,
            "--split": "90,10,0",
            "--eval-interval": 1,
            "--eval-iters": 2,
            "--distributed-timeout-minutes": 1,
        }
    ),
    "--calculate-per-token-loss",
)
