"""The tiny model that is trained in place of the real one, cut by TP groups as they cut the real
one."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.inputs.lora import LORA_FLAG, TARGETS, Lora
from zorse_megatron.inputs.model import (
    SHARED_EXPERT_FLAG,
    JobRecompute,
    ModelShape,
    PositionEmbedding,
)
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts, tp_groups_of
from zorse_megatron.plan.plan import ModelFingerprint, Plan, Replica, TpShards

# Sizes of the tiny model, such that TP groups cut it as they cut the real one.
#
# Without TP groups its sizes do not matter. With them it has as many KV groups as the real model, a
# sequence and a vocabulary that all TP groups divide, and as many columns as make uneven TP shards
# come out in the real proportion. It has experts where plans let ranks share them alone, as few as
# their parts allow.


# No parameter is padded, so that buckets end where the real model's do.
HIDDEN_SIZE = 64
SEQUENCE_LENGTH = 32
NUM_HEADS = 2
FFN_HIDDEN_SIZE = 4 * HIDDEN_SIZE
VOCABULARY = 256
EXPERT_FFN_HIDDEN_SIZE = 16
_POSITIONS = {"learned": "learned_absolute", "rope": "rope", "none": "none"}
"""As Megatron's flag names them."""
LORA_RANK = 4
_MOST_UNITS = 1024
"""Beyond so many columns proportions are rounded."""


@dataclass(frozen=True, kw_only=True)
class TinyShape:
    """What depends on the TP groups of the plans that are trained."""

    sequence_length: int = SEQUENCE_LENGTH
    num_heads: int = NUM_HEADS
    """Each a KV group of its own."""
    ffn_hidden_size: int = FFN_HIDDEN_SIZE
    vocabulary_rows: int = VOCABULARY
    """Padding included."""
    position_embedding: PositionEmbedding | None = None
    """The real model's, where there are TP groups: of learned positions they sum more."""
    num_experts: int = 0
    """Of the layers that have some in the real model."""
    moe_layer_freq: tuple[int, ...] | None = None
    """Layer -> whether it is one of them, where not all are."""
    has_shared_expert: bool = False
    """Whether these have one that all tokens pass."""

    @classmethod
    def of(cls, model: ModelShape, plans: Collection[Plan]) -> "TinyShape":
        """That in which the real model's plans can be trained."""
        replicas = [replica for plan in plans for _, replica in tp_groups_of(plan)]
        num_experts = _fewest_experts(plans)
        if not replicas:
            return cls(
                num_experts=num_experts,
                moe_layer_freq=model.moe_layer_freq,
                has_shared_expert=bool(model.experts and model.experts.shared_ffn_hidden_size),
            )
        degrees = math.lcm(*(len(replica.ranks) for replica in replicas))
        columns = math.lcm(degrees, *_units(replicas))
        return cls(
            sequence_length=_least_multiple(degrees, SEQUENCE_LENGTH),
            num_heads=model.num_query_groups,
            ffn_hidden_size=_least_multiple(columns, FFN_HIDDEN_SIZE),
            vocabulary_rows=_least_multiple(degrees, VOCABULARY),
            position_embedding=model.position_embedding,
            num_experts=num_experts,
        )

    def flags(self) -> list[str]:
        """Megatron's, beyond those of any tiny model; to come last."""
        experts = [
            *("--num-experts", str(self.num_experts), "--moe-router-topk", "2"),
            *("--moe-ffn-hidden-size", str(EXPERT_FFN_HIDDEN_SIZE), "--disable-bias-linear"),
            *("--moe-router-load-balancing-type", "none"),
        ]
        if self.moe_layer_freq is not None:
            experts += ["--moe-layer-freq", str(list(self.moe_layer_freq)).replace(" ", "")]
        if self.has_shared_expert:  # wide, as its shards are whole rows
            experts += [SHARED_EXPERT_FLAG, str(FFN_HIDDEN_SIZE)]
        experts = experts if self.num_experts else []
        if self.position_embedding is None:
            return experts
        return [
            *experts,
            *("--position-embedding-type", _POSITIONS[self.position_embedding]),
            *("--kv-channels", str(max(2, HIDDEN_SIZE // self.num_heads))),  # rotated in pairs
            *("--ffn-hidden-size", str(self.ffn_hidden_size)),
            *("--make-vocab-size-divisible-by", str(self.vocabulary_rows)),
        ]

    def plan(self, plan: Plan) -> Plan:
        """The same plan, for the tiny model: of what it says only parts depend on width."""
        groups = tuple(
            dataclasses.replace(group, replicas=tuple(map(self._replica, group.replicas)))
            for group in plan.groups
        )
        model = ModelFingerprint(num_layers=plan.model.num_layers)
        return dataclasses.replace(plan, model=model, groups=groups)

    def _replica(self, replica: Replica) -> Replica:
        tp_shards, shared = replica.tp_shards, replica.expert_parallel
        if shared is not None:
            counts = _in_proportion(shared.experts, self.num_experts)
            assert counts is not None
            shared = dataclasses.replace(shared, experts=counts)
            return dataclasses.replace(replica, expert_parallel=shared)
        if tp_shards is None:
            return replica
        scaled = TpShards(
            kv_groups=tp_shards.kv_groups,
            mlp_columns=_in_proportion(_parts_of_mlp(tp_shards), self.ffn_hidden_size),
            vocabulary_rows=_in_proportion(tp_shards.vocabulary_rows, self.vocabulary_rows),
        )
        return dataclasses.replace(replica, tp_shards=scaled)


def _units(replicas: Iterable[Replica]) -> Iterator[int]:
    """How many equal pieces of the MLP uneven TP shards are made of."""
    for replica in replicas:
        counts = None if replica.tp_shards is None else _parts_of_mlp(replica.tp_shards)
        if counts:
            units = sum(counts) // math.gcd(*counts)
            if units <= _MOST_UNITS:
                yield units


def _parts_of_mlp(tp_shards: TpShards) -> tuple[int, ...] | None:
    """An MLP stands for experts, too, of which a TP group sums what it sums of an MLP."""
    return tp_shards.experts or tp_shards.mlp_columns


def _fewest_experts(plans: Iterable[Plan]) -> int:
    """Of which all ranks that share experts have their parts; each token has two."""
    shared = [each for plan in plans for *_, each in replicas_that_share_experts(plan)]
    if not shared:
        return 0
    unit = math.gcd(*(count for each in shared for count in each.experts))
    return max(2, sum(shared[0].experts) // unit)


def _least_multiple(of: int, least: int) -> int:
    return of * -(-least // of)


def _in_proportion(counts: Sequence[int] | None, total: int) -> tuple[int, ...] | None:
    """The counts, scaled to `total`; what is something stays something.

    >>> _in_proportion((3000, 0, 1), 256)
    (255, 0, 1)
    """
    if counts is None:
        return None
    whole = sum(counts)
    bounds = [round(total * upto / whole) for upto in accumulate(counts, initial=0)]
    scaled = [stop - start for start, stop in pairwise(bounds)]
    for index, count in enumerate(counts):
        if count and not scaled[index]:
            scaled[scaled.index(max(scaled))] -= 1
            scaled[index] = 1
    return tuple(scaled)


def lora_flags(lora: Lora | None) -> tuple[str, ...]:
    """Flags of the tiny model's adapters, whose sizes no bucket pads; it has no gate."""
    if lora is None:
        return ()
    wanted = {"up" if target == "gate" else target for target in lora.targets}
    targets = tuple(target for target in TARGETS if target in wanted)
    return LORA_FLAG, str(Lora(rank=LORA_RANK, alpha=lora.alpha, targets=targets))


# An early receive may wait long on this machine for its sender.
TIMEOUT_MINUTES = 30


@dataclass(frozen=True, kw_only=True)
class TinyTraining:
    """What is trained, and for how long."""

    model: ModelShape
    """The real one."""
    global_batch_size: int
    iterations: int
    recompute: JobRecompute | None = None
    """What is recomputed in groups whose plan does not say."""
    seed: int = 1234
    shape: TinyShape = field(default_factory=TinyShape)
    sequence_parallel: bool = False
    """Whether the TP groups of plans split the sequence."""


def training_flags(training: TinyTraining, data: Sequence[str]) -> list[str]:
    """Megatron's flags of a GPT with the real one's layers and ties, and little width.

    fp32 without dropout, so that layouts differ by the order of summation only; but for groups of a
    plan with types of their own. `data`: flags of the corpus.
    """
    steps = training.iterations
    flags: dict[str, object] = {
        "--num-layers": training.model.num_layers,
        "--hidden-size": HIDDEN_SIZE,
        "--num-attention-heads": training.shape.num_heads,
        "--seq-length": training.shape.sequence_length,
        "--max-position-embeddings": training.shape.sequence_length,
        "--global-batch-size": training.global_batch_size,
        "--train-iters": steps,
        "--lr": 1e-3,
        "--lr-decay-style": "constant",
        "--clip-grad": 1.0,
        # For groups in fp16: so low that no step is skipped, which would take less time.
        "--initial-loss-scale": 16,
        # Logging adds barriers, which cost a round trip each.
        "--log-interval": 10 * steps,
        "--seed": training.seed,
        "--distributed-timeout-minutes": TIMEOUT_MINUTES,
    }
    untied = [] if training.model.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    arguments = [str(word) for pair in flags.items() for word in pair]
    arguments += [*WITHOUT_EVALUATION, *WITHOUT_WORKERS, *WITHOUT_DROPOUT]
    # Of gloo groups, which stock makes for another format of checkpoints, the clock would not know.
    arguments.append("--disable-gloo-process-groups")
    recompute = _recompute_flags(training.recompute)
    return [*arguments, *untied, *recompute, *data, *training.shape.flags()]


def _recompute_flags(recompute: JobRecompute | None) -> list[str]:
    """What `flags.model_in_flags` reads as this. What "selective" covers changes costs only."""
    if recompute is None:
        return []
    if recompute.mode == "selective":
        return ["--recompute-granularity", "selective"]
    layers, method = recompute.num_layers, "block"
    if layers is None:
        layers, method = recompute.layers_at_once, "uniform"
    full = ["--recompute-granularity", "full", "--recompute-method", method]
    return [*full, "--recompute-num-layers", str(layers)]
