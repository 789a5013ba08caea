"""Training runs about time and memory: flags, plans, the simulator's answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

from zorse_megatron.doctor.machine import Gpu
from zorse_megatron.doctor.workshop import Trained
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.computing_flags import computing_from_flags
from zorse_megatron.flags.shape import shape_from_flags
from zorse_megatron.flags.turned_off import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.gpus.compute_capability import BF16_FROM
from zorse_megatron.schema.gpus.device_names import kind_of_device
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.plan.plan import (
    Chunk,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
)
from zorse_megatron.schema.profile.profile_json import load_profile
from zorse_megatron.simulate.iteration import simulate

HIDDEN, HEADS, SEQUENCE, VOCABULARY = 2048, 16, 1024, 256
PARAMETERS_PER_LAYER = 12 * HIDDEN**2
STATE_BYTES = 18
"""Per parameter, with a 16-bit weight: that, and fp32 weight, gradient and both moments."""
MICRO_BATCH_SIZE = 2
ITERATIONS, WARM_UP = 5, 2


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """One run, of one group whose replicas are equal and which recomputes its layers."""

    layers: int
    micro_batches: int
    """Of each rank."""
    ranks: int = 1
    parameters: Literal["per_pass", "resident"] | None = None
    """Setting of the breadth-first schedule, with a chunk per layer; None: 1F1B with one chunk."""
    in_host: bool = False
    """Whether all that can wait in host memory does; needs a chunk per layer."""

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.ranks * self.micro_batches * MICRO_BATCH_SIZE

    @property
    def plan(self) -> Plan:
        """For so many ranks."""
        replicas = tuple(
            Replica(
                ranks=(rank,),
                micro_batch_size=MICRO_BATCH_SIZE,
                num_microbatches=self.micro_batches,
                shard_weight=1.0,
            )
            for rank in range(self.ranks)
        )
        offload = Offload(parameters=True, gradients=True, optimizer_state=True, activations=True)
        group = Group(
            replicas=replicas,
            recompute=Recompute(mode="full"),
            offload=offload if self.in_host else None,
        )
        size = 1 if self.parameters else self.layers
        return Plan(
            schema_version=1,
            global_batch_size=self.global_batch_size,
            model=ModelFingerprint(num_layers=self.layers),
            groups=(group,),
            chunks=tuple(
                Chunk(group=0, layers=(at, at + size)) for at in range(0, self.layers, size)
            ),
            schedule=Schedule(name="breadth_first", parameters={"parameters": self.parameters})
            if self.parameters
            else Schedule(name="1f1b"),
        )

    def flags(self, layers: Sequence[str]) -> Callable[[Path, list[str]], list[str]]:
        """Megatron's flags, once the corpus is known. `layers`: `Machine.layer_flags`."""

        def base(prefix: Path, tokenizer: list[str]) -> list[str]:
            return [*model_flags(self, layers), "--data-path", str(prefix), *tokenizer]

        return base


def model_flags(case: TimedCase, layers: Sequence[str]) -> list[str]:
    """Without those of the data."""
    values = {
        "--num-layers": case.layers,
        "--hidden-size": HIDDEN,
        "--num-attention-heads": HEADS,
        "--seq-length": SEQUENCE,
        "--max-position-embeddings": SEQUENCE,
        "--micro-batch-size": MICRO_BATCH_SIZE,
        "--global-batch-size": case.global_batch_size,
        "--train-iters": ITERATIONS,
        "--lr": 1e-4,
        "--lr-decay-style": "constant",
        "--split": "100,0,0",
        "--log-interval": 1,
        "--initial-loss-scale": 16,
        "--distributed-timeout-minutes": 5,
    }
    words = [str(word) for pair in values.items() for word in pair]
    words += [*WITHOUT_EVALUATION, *WITHOUT_WORKERS, *WITHOUT_DROPOUT]
    return [*words, "--untie-embeddings-and-output-weights", *layers]


def cluster_of(gpu: Gpu) -> str:
    """A cluster file with this GPU alone.

    Of a kind that is not well known, all but the memory is another one's; times are measured.
    """
    kind = kind_of_device(gpu.name, gpu.total_bytes)
    if kind in GPU_KINDS:
        return f"nodes:\n  - gpus: 1 x {kind}\n"
    like = "A100-40" if gpu.capability >= BF16_FROM else "T4"
    memory = f"{gpu.total_bytes / 1e9:.1f}GB"
    return (
        f'gpu_kinds:\n  - {{name: "{kind}", like: {like}, memory: {memory}}}\n'
        f'nodes:\n  - gpus: [{{kind: "{kind}"}}]\n'
    )


def predicted(
    case: TimedCase, layers: Sequence[str], cluster: Path, profile: Path
) -> tuple[float, int]:
    """The simulator's iteration (s) and peak (bytes). Raises ZorseError."""
    words = [*model_flags(case, layers), "--vocab-size", str(VOCABULARY)]
    inputs = make_inputs(
        load_cluster(cluster),
        shape_from_flags(words),
        load_profile(profile),
        global_batch_size=case.plan.global_batch_size,
        dtype="bfloat16" if "--bf16" in layers else "float16",
        computing=computing_from_flags(read_command(words).args),
    )
    result = simulate(
        case.plan,
        inputs.compute,
        inputs.memory,
        inputs.comm,
        inputs.kinds,
        sequence_length=SEQUENCE,
    )
    return result.iteration_s, result.peak_memory_bytes[0]


def iteration_s(run: Trained) -> float:
    """Median of a run's iterations after the warm-up."""
    return median(value for step, value in run.elapsed_s.items() if step > WARM_UP)
