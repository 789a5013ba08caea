"""What to measure: which links, which layers, and the process that times a layer.

Messages are timed once for each kind of node, and for each pair of kinds: all pairs of nodes would
take a time that grows with the square of the cluster, and say the same. Layers are timed by a
process of its own, with the training command of a single rank that builds one layer of the user's
model; requests and answers are lines of JSON.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path

from pydantic import TypeAdapter

from zorse_megatron.errors import MeasureError
from zorse_megatron.flags.command import find_flags, split_ours
from zorse_megatron.gpus.gpu import Attention
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.inputs.profile import Part, TimedOperation, Transfers
from zorse_megatron.measure.machine import SeenNode
from zorse_megatron.processes import free_port, rank_variables

_AMONG_ALL: tuple[TimedOperation, ...] = (
    "all_gather",
    "all_gather_unequal",
    "reduce_scatter",
    "reduce_scatter_unequal",
    "all_reduce",
)


@dataclass(frozen=True, kw_only=True)
class LinkTask:
    """Some ranks exchange messages of several sizes, while all others wait."""

    operation: TimedOperation
    nodes: tuple[str, ...]
    """Kinds of the nodes: one for inside a node, two for between nodes."""
    ranks: tuple[int, ...]
    """Who takes part; of sends the first half sends to the second half, each rank to one."""
    gpu_kinds: tuple[str, ...]
    """By rank."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal to the key of what comes of it."""
        return (self.operation, self.nodes, self.gpu_kinds)

    def __str__(self) -> str:
        """As the progress bar says it."""
        count = len(self.ranks) // 2 if self.operation == "send" else len(self.ranks)
        noun = "pair" if self.operation == "send" else "rank"
        return f"{self.operation}, {count} {noun}{'s'[: count > 1]}: {' | '.join(self.nodes)}"


def link_tasks(nodes: Sequence[SeenNode]) -> tuple[LinkTask, ...]:
    """Return everything that is to be timed on a cluster, each thing once."""
    tasks = [*_inside(nodes), *_between(nodes)]
    return tuple({task.key: task for task in reversed(tasks)}.values())[::-1]


def missing_tasks(tasks: Iterable[LinkTask], known: Iterable[Transfers]) -> tuple[LinkTask, ...]:
    """Return the tasks that have no times yet."""
    keys = {transfers.key for transfers in known}
    return tuple(task for task in tasks if task.key not in keys)


def _inside(nodes: Sequence[SeenNode]) -> Iterator[LinkTask]:
    for node in _first_of_each_kind(nodes):
        if len(node.ranks) < 2:
            continue
        for pair in _pairs_of_kinds(node):
            yield _task("send", (node,), pair)
        for operation in _AMONG_ALL:
            yield _task(operation, (node,), node.ranks)


def _between(nodes: Sequence[SeenNode]) -> Iterator[LinkTask]:
    firsts = _first_of_each_kind(nodes)
    for one, other in combinations_with_replacement(firsts, 2):
        if one is other:
            same = [node for node in nodes if node.kind == one.kind]
            if len(same) < 2:
                continue
            other = same[1]  # noqa: PLW2901  (two nodes of one kind: the first two)
        count = min(len(one.ranks), len(other.ranks))
        for sharing in sorted({1, count}):
            yield _task("send", (one, other), (*one.ranks[:sharing], *other.ranks[:sharing]))
        everyone = (*one.ranks, *other.ranks)
        for operation in _AMONG_ALL:
            yield _task(operation, (one, other), everyone)


def _first_of_each_kind(nodes: Sequence[SeenNode]) -> list[SeenNode]:
    return list({node.kind: node for node in reversed(nodes)}.values())[::-1]


def _pairs_of_kinds(node: SeenNode) -> Iterator[tuple[int, ...]]:
    """Yield the first pair of ranks for each pair of kinds of GPU in a node."""
    ranks_of: dict[str, list[int]] = {}
    for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True):
        ranks_of.setdefault(kind, []).append(rank)
    for one, other in combinations_with_replacement(ranks_of, 2):
        if one != other:
            yield ranks_of[one][0], ranks_of[other][0]
        elif len(ranks_of[one]) > 1:
            yield ranks_of[one][0], ranks_of[one][1]


def _task(
    operation: TimedOperation, nodes: tuple[SeenNode, ...], ranks: tuple[int, ...]
) -> LinkTask:
    kind_of = {
        rank: kind for node in nodes for rank, kind in zip(node.ranks, node.gpu_kinds, strict=True)
    }
    return LinkTask(
        operation=operation,
        nodes=tuple(node.kind for node in nodes),
        ranks=ranks,
        gpu_kinds=tuple(kind_of[rank] for rank in ranks),
    )


# What a plan decides, or what has to do with other ranks, with checkpoints or with logs: a single
# layer on a single rank needs none of it.
_LEFT_OUT = (
    *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"),
    *("--decoder-last-pipeline-num-layers", "--account-for-embedding-in-pipeline-split"),
    *("--account-for-loss-in-pipeline-split", "--moe-layer-freq", "--sequence-parallel"),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--recompute-activations"),
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--recompute-modules", "--rampup-batch-size", "--load", "--use-checkpoint-args"),
    *("--use-mp-args-from-checkpoint-args", "--pretrained-checkpoint", "--save"),
    *("--tensorboard-dir", "--wandb-project", "--train-samples", "--lr-decay-samples"),
    *("--lr-warmup-samples", "--lr-decay-iters", "--lr-warmup-iters", "--lr-warmup-fraction"),
    *("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file"),
    "--null-tokenizer-eod-id",
)


def _of_experts(flags: Sequence[str]) -> Iterator[str]:
    for word in flags:
        if word.startswith("--moe-"):
            yield word.partition("=")[0]


def single_layer_flags(flags: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Return the flags that build embedding, one layer and head of a model on one rank.

    Of flags that are given twice stock takes the last one, so ours come after. The tokenizer is
    one without files: only the size of its vocabulary matters. `shape`: without experts, a layer
    that has none, whatever the flags say.
    """
    _, rest = split_ours(flags)
    left_out = _LEFT_OUT if shape.experts else (*_LEFT_OUT, "--num-experts", *_of_experts(rest))
    _, kept = find_flags(rest, dict.fromkeys(left_out, "*"))
    return (
        *kept,
        *("--num-layers", "1", "--micro-batch-size", "1", "--global-batch-size", "1"),
        *("--pipeline-model-parallel-size", "1", "--tensor-model-parallel-size", "1"),
        *("--expert-model-parallel-size", "1"),
        *("--train-iters", "1", "--lr", "1e-4", "--lr-decay-style", "constant"),
        *("--tokenizer-type", "NullTokenizer", "--null-tokenizer-eod-id", "0"),
        *("--vocab-size", str(shape.vocab_size), "--make-vocab-size-divisible-by", "1"),
    )


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """What is still to be measured of one model on one kind of GPU."""

    first_sizes: dict[Part, int]
    """Part -> micro-batch size to start with."""
    largest_size: int
    """No larger micro-batches."""
    time_limit_s: float
    """No larger micro-batches after one whose forward and backward took longer."""
    memory_limit_bytes: int | None
    """No larger micro-batches that would come near to it; None: until memory runs out, which a
    GPU survives and a host does not."""
    used_bytes: int | None = None
    """Of the GPU before the process that measures starts; None: not on a GPU."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """One micro-batch through one part of the model."""

    part: Part
    micro_batch_size: int
    forward_s: float
    backward_s: float
    parameters: int
    saved_bytes: int
    """From forward to backward, without input and output."""
    peak_bytes: int
    """While both run."""
    attention: Attention | None = None
    """What core attention ran; None: the part has none."""
    weight_gradients_s: float | None = None
    """Of a layer's backward, apart from it; None: its software computes them together."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The optimizer's step on all parameters of the model that was built."""

    num_parameters: int
    update_s: float
    context_bytes: int | None = None
    """What the process then has on its GPU beside torch's allocator; None: not on a GPU."""


Answer = MeasuredPass | MeasuredStep


REQUESTS = TypeAdapter(LayerRequest)
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Answer)
"""Both as lines of JSON."""
_TAIL_LINES = 25


def measured_layers(
    script: Path | None, flags: Sequence[str], request: LayerRequest, local_rank: int
) -> Iterator[Answer]:
    """Yield what the process answers. Raises MeasureError with its last lines if it fails."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "zorse_megatron.measure.on_ranks.layer_timing"),
                *(str(writing), REQUESTS.dump_json(request).decode()),
                *([str(script)] if script else []),
                *flags,
            ],
            env=_environment(local_rank),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            with os.fdopen(reading) as answers:
                for line in answers:
                    yield ANSWERS.validate_json(line)
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if status:
            log.seek(0)
            raise _failure(status, log.read())


def _environment(local_rank: int) -> dict[str, str]:
    """The only rank of a job of its own; torchrun's agent must not be asked for its store."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return {**kept, **rank_variables(0, 1, free_port()), "LOCAL_RANK": str(local_rank)}


def _failure(status: int, output: str) -> MeasureError:
    tail = "\n".join(output.splitlines()[-_TAIL_LINES:])
    return MeasureError.of(
        "the layers cannot be measured",
        where="the process that builds the layers",
        found=f"exit status {status}",
        expected="0",
        remedy=f"Its last lines:\n{tail}",
    )
