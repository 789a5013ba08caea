"""A small GPT, its training command, and a plan for it: five unequal ranks in three groups."""

from pathlib import Path

from zorse_megatron.flags.turned_off import WITHOUT_DROPOUT, WITHOUT_WORKERS
from zorse_megatron.schema.plan.plan import (
    Chunk,
    ClusterFingerprint,
    Group,
    ModelFingerprint,
    Plan,
    Replica,
    Schedule,
)

NUM_LAYERS = 6
HIDDEN_SIZE = 96
NUM_HEADS = 4
SEQ_LENGTH = 64
GLOBAL_BATCH_SIZE = 24


def uneven_plan() -> Plan:
    """Groups of 2, 1 and 2 ranks; sizes, counts, layers and shards of state are all unequal."""
    return Plan(
        schema_version=1,
        global_batch_size=GLOBAL_BATCH_SIZE,
        model=ModelFingerprint(
            num_layers=NUM_LAYERS,
            hidden_size=HIDDEN_SIZE,
            num_attention_heads=NUM_HEADS,
            seq_length=SEQ_LENGTH,
            tied_embeddings=True,
        ),
        groups=(
            Group(name="front", replicas=(_replica(0, 4, 4, 3.0), _replica(1, 2, 4, 1.0))),
            Group(name="middle", replicas=(_replica(2, 3, 8, 1.0),)),
            Group(name="back", replicas=(_replica(3, 3, 6, 2.0), _replica(4, 2, 3, 3.0))),
        ),
        chunks=(
            Chunk(group=0, layers=(0, 3)),
            Chunk(group=1, layers=(3, 4)),
            Chunk(group=2, layers=(4, 6)),
        ),
        schedule=Schedule(name="1f1b"),
        cluster=ClusterFingerprint(name="five processes on one machine's CPU"),
    )


def _replica(rank: int, size: int, count: int, weight: float) -> Replica:
    return Replica(
        ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=weight
    )


def training_flags(corpus: Path, *, tokenizer: list[str], num_iterations: int) -> list[str]:
    """Megatron's flags, the same with and without a plan.

    fp32 without dropout, so that only the order of summation may differ between the two. The
    learning rate is one at which rounding errors do not grow: at 2e-3 two of stock's own layouts
    are 1e-3 apart after 30 iterations, at 1e-3 they stay within 5e-7 (measured on this model).
    """
    flags: dict[str, object] = {
        "--num-layers": NUM_LAYERS,
        "--hidden-size": HIDDEN_SIZE,
        "--num-attention-heads": NUM_HEADS,
        "--seq-length": SEQ_LENGTH,
        "--max-position-embeddings": SEQ_LENGTH,
        "--micro-batch-size": 4,
        "--global-batch-size": GLOBAL_BATCH_SIZE,
        "--train-iters": num_iterations,
        "--lr": 1e-3,
        "--min-lr": 1e-4,
        "--lr-decay-style": "cosine",
        "--lr-warmup-iters": max(1, num_iterations // 8),
        "--weight-decay": 0.1,
        "--clip-grad": 1.0,
        "--data-path": corpus,
        "--data-cache-path": corpus.parent / "cache",
        "--split": "90,10,0",
        "--eval-interval": num_iterations // 2,
        "--eval-iters": 2,
        "--log-interval": 1,
        "--seed": 1234,
        "--distributed-timeout-minutes": 1,
    }
    return [
        *(str(word) for pair in flags.items() for word in pair),
        *WITHOUT_WORKERS,
        *WITHOUT_DROPOUT,
        "--calculate-per-token-loss",
        *tokenizer,
    ]
