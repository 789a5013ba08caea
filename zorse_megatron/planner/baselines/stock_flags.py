"""What starts unmodified Megatron in a layout: its flags, and each host's GPUs in order."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zorse_megatron.planner.baselines.stock_grids import Grid
from zorse_megatron.planner.inputs.search_inputs import Inputs


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node with the GPUs that its ranks are on, in the order of ranks."""

    name: str
    gpus: tuple[int, ...]
    """Numbers on the node, as CUDA_VISIBLE_DEVICES takes them."""


def hosts_of(inputs: Inputs, ranks: Sequence[int]) -> tuple[Host, ...]:
    """Hosts in the order of `--node-rank`. `ranks`: rank of stock's job -> rank of the cluster."""
    spec = inputs.spec
    return tuple(
        Host(
            name=spec.nodes[node].name,
            gpus=tuple(spec.nodes[node].numbers[rank - spec.ranks_of(node)[0]] for rank in some),
        )
        for node, some in itertools.groupby(ranks, key=spec.node_of)
    )


def layout_flags(grid: Grid) -> tuple[str, ...]:
    """Megatron's flags of a layout, with those that hide communication behind computation.

    Model, batch, type and `--sequence-parallel` are those of the training command.
    """
    return tuple(itertools.chain(_parallel(grid), _split(grid), _recompute(grid)))


def _parallel(grid: Grid) -> Iterator[str]:
    if grid.tensor > 1:
        yield from ("--tensor-model-parallel-size", str(grid.tensor))
    yield from ("--pipeline-model-parallel-size", str(grid.stages))
    yield from ("--micro-batch-size", str(grid.micro_batch_size))
    if grid.distributed:
        yield from ("--use-distributed-optimizer", "--overlap-param-gather")
    yield "--overlap-grad-reduce"


def _split(grid: Grid) -> Iterator[str]:
    """Layers of each virtual stage: where they are even, without a layout."""
    ends = grid.counts_ends
    if grid.virtual > 1:
        yield "--overlap-p2p-communication-warmup-flush"
    if ends is None:
        yield from ("--pipeline-model-parallel-layout", grid.layout)
        return
    if grid.virtual > 1:
        yield from ("--num-virtual-stages-per-pipeline-rank", str(grid.virtual))
    if ends[0]:
        yield "--account-for-embedding-in-pipeline-split"
    if ends[1]:
        yield "--account-for-loss-in-pipeline-split"


def _recompute(grid: Grid) -> Iterator[str]:
    if grid.mode != "none":
        yield from ("--recompute-granularity", grid.mode)
    if grid.mode == "full":
        method, count = ("uniform", 1) if grid.recomputed is None else ("block", grid.recomputed)
        yield from ("--recompute-method", method, "--recompute-num-layers", str(count))
