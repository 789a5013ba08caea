"""The tiny model that is trained in place of the real one, and the plan for it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.schema.model.computing import JobRecompute
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.plan.plan import ModelFingerprint, Plan

# No parameter is padded, so that buckets end where the real model's do.
HIDDEN_SIZE = 64
SEQUENCE_LENGTH = 32
NUM_HEADS = 2
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


def training_flags(training: TinyTraining, data: Sequence[str]) -> list[str]:
    """Megatron's flags of a GPT with the real one's layers and ties, and little width.

    fp32 without dropout, so that layouts differ by the order of summation only; but for groups of a
    plan with types of their own. `data`: flags of the corpus.
    """
    steps = training.iterations
    flags: dict[str, object] = {
        "--num-layers": training.model.num_layers,
        "--hidden-size": HIDDEN_SIZE,
        "--num-attention-heads": NUM_HEADS,
        "--seq-length": SEQUENCE_LENGTH,
        "--max-position-embeddings": SEQUENCE_LENGTH,
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
        "--global-batch-size": training.global_batch_size,
        "--train-iters": steps,
        "--lr": 1e-3,
        "--lr-decay-style": "constant",
        "--clip-grad": 1.0,
        # For groups in fp16: so low that no step is skipped, which would take less time.
        "--initial-loss-scale": 16,
        "--eval-interval": 10 * steps,
        "--eval-iters": 0,
        # Logging adds barriers, which cost a round trip each.
        "--log-interval": 10 * steps,
        "--num-workers": 0,
        "--seed": training.seed,
        "--distributed-timeout-minutes": TIMEOUT_MINUTES,
    }
    untied = [] if training.model.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    arguments = [str(word) for pair in flags.items() for word in pair]
    # Of gloo groups, which stock makes for another format of checkpoints, the clock would not know.
    arguments.append("--disable-gloo-process-groups")
    return [*arguments, *untied, *_recompute_flags(training.recompute), *data]


def _recompute_flags(recompute: JobRecompute | None) -> list[str]:
    """What `flags.computing_flags` reads as this. What "selective" covers changes costs only."""
    if recompute is None:
        return []
    if recompute.mode == "selective":
        return ["--recompute-granularity", "selective"]
    layers, method = recompute.num_layers, "block"
    if layers is None:
        layers, method = recompute.layers_at_once, "uniform"
    full = ["--recompute-granularity", "full", "--recompute-method", method]
    return [*full, "--recompute-num-layers", str(layers)]


def plan_for_tiny(plan: Plan) -> Plan:
    """The same plan, said to be for the tiny model; nothing else of a plan depends on width."""
    model = ModelFingerprint(num_layers=plan.model.num_layers)
    return dataclasses.replace(plan, model=model)
