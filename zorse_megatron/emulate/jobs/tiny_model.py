"""The tiny model that is trained in place of the real one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zorse_megatron.emulate.jobs.tiny_shape import HIDDEN_SIZE, TinyShape
from zorse_megatron.flags.turned_off import (
    WITHOUT_DROPOUT,
    WITHOUT_EVALUATION,
    WITHOUT_WORKERS,
)
from zorse_megatron.schema.model.computing import JobRecompute
from zorse_megatron.schema.model.model_shape import ModelShape

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
    """Whether the sets of plans split the sequence."""


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
