"""The runs of `bench_offload_gpu.py`: their plans, their flags, and what the model says of them."""

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.costs.transformer_memory import TransformerMemory, precision_of
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.model.model_shape import ModelShape
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
from zorse_megatron.simulate.iteration import simulate

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run."""

    name: str
    layers: int
    micro_batches: int
    parameters: str | None
    """Setting of the breadth-first schedule, with a chunk per layer; None: 1F1B with one chunk."""
    offload: Offload | None
    ranks: int = 1


def plan_of(case: Case, options: argparse.Namespace) -> Plan:
    """One group, even replicas, full recomputation."""
    replicas = tuple(
        Replica(
            ranks=(rank,),
            micro_batch_size=options.micro_batch_size,
            num_microbatches=case.micro_batches,
            shard_weight=1.0,
        )
        for rank in range(case.ranks)
    )
    chunks = tuple(Chunk(group=0, layers=(at, at + 1)) for at in range(case.layers))
    group = Group(replicas=replicas, recompute=Recompute(mode="full"), offload=case.offload)
    return Plan(
        schema_version=1,
        global_batch_size=sum(replica.num_samples for replica in replicas),
        model=ModelFingerprint(num_layers=case.layers),
        groups=(group,),
        chunks=chunks if case.parameters else (Chunk(group=0, layers=(0, case.layers)),),
        schedule=Schedule(name="breadth_first", parameters={"parameters": case.parameters})
        if case.parameters
        else Schedule(name="1f1b"),
    )


def memory_of(layers: int, options: argparse.Namespace) -> TransformerMemory:
    """The planner's memory model of the runs' GPT."""
    shape = ModelShape(
        name="bench",
        num_layers=layers,
        hidden_size=options.hidden,
        ffn_hidden_size=4 * options.hidden,
        num_attention_heads=options.heads,
        num_query_groups=options.heads,
        kv_channels=options.hidden // options.heads,
        vocab_size=options.vocabulary,
        seq_length=options.sequence,
        position_embedding="learned",
        max_positions=options.sequence,
    )
    dtype = "float32" if options.dry_run else "bfloat16"
    attention = "flash" if HAS_ENGINE and not options.dry_run else "unfused"
    return TransformerMemory(
        model=shape, dtype=dtype, precision=precision_of(dtype), attention=attention
    )


def state_bytes(layers: int, options: argparse.Namespace) -> int:
    """Parameters, gradients and optimizer state, all of them."""
    memory = memory_of(layers, options)
    count = sum(chunk_parameters(layers, memory))
    return memory.parameter_bytes(count) + memory.gradient_bytes(count) + memory.state_bytes(count)


def chunk_parameters(layers: int, memory: TransformerMemory) -> list[int]:
    """By chunk."""
    counts = [memory.layer_parameters()] * layers
    counts[0] += memory.embedding_parameters()
    counts[-1] += memory.head_parameters(tied_on_same_rank=False)
    return counts


def predicted_bytes(case: Case, options: argparse.Namespace, work: Path) -> int:
    """The simulator's peak."""
    memory = memory_of(case.layers, options)
    (work / "cluster.yaml").write_text(f"nodes:\n  - {{name: here, gpus: {case.ranks} x A6000}}\n")
    inputs = make_inputs(
        load_cluster(work / "cluster.yaml"),
        memory.model,
        None,
        global_batch_size=plan_of(case, options).global_batch_size,
        dtype=memory.dtype,
    )
    result = simulate(
        plan_of(case, options),
        inputs.compute,
        memory,
        inputs.comm,
        inputs.kinds,
        sequence_length=options.sequence,
    )
    return result.peak_memory_bytes[0]


def flags_of(case: Case, options: argparse.Namespace, data: Sequence[object]) -> list[str]:
    """Megatron's flags; what it lacks without Transformer Engine and Apex is added at its start."""
    batch = plan_of(case, options).global_batch_size
    flags: dict[str, object] = {
        "--num-layers": case.layers,
        "--hidden-size": options.hidden,
        "--num-attention-heads": options.heads,
        "--seq-length": options.sequence,
        "--max-position-embeddings": options.sequence,
        "--attention-dropout": 0,
        "--hidden-dropout": 0,
        "--micro-batch-size": 1,
        "--global-batch-size": batch,
        "--train-iters": options.iterations,
        "--lr": 1e-4,
        "--lr-decay-style": "constant",
        "--split": "100,0,0",
        "--num-workers": 0,
        "--eval-iters": 0,
        "--eval-interval": 1000,
        "--log-interval": 1,
        "--distributed-timeout-minutes": 5,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += ["--untie-embeddings-and-output-weights", *map(str, data)]
    return words if options.dry_run else [*words, "--bf16"]
