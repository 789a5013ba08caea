"""Megatron's flags for an even layout of stock, on the tiny model that is trained in emulation."""

from zorse_megatron.emulate.jobs.tiny_shape import HIDDEN_SIZE
from zorse_megatron.planner.baselines.stock_grids import Grid
from zorse_megatron.planner.inputs.search_inputs import Inputs

# Stock's default: buckets of this many parameters (`DistributedDataParallel.__init__`).
_BUCKET_PARAMETERS = 40_000_000
_TINY_LAYER_PARAMETERS = 12 * HIDDEN_SIZE**2 + 13 * HIDDEN_SIZE


def flags_of_grid(inputs: Inputs, grid: Grid) -> tuple[str, ...]:
    """Megatron's flags, with those that hide communication behind computation.

    Buckets of gradients are cut where those of the real model would be.
    """
    scale = _TINY_LAYER_PARAMETERS / inputs.memory.layer_parameters()
    flags = [
        *(("--tensor-model-parallel-size", str(grid.tensor)) if grid.tensor > 1 else ()),
        *("--pipeline-model-parallel-size", str(grid.stages)),
        *("--micro-batch-size", str(grid.micro_batch_size)),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--ddp-bucket-size", str(max(1, round(_BUCKET_PARAMETERS * scale)))),
    ]
    if grid.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(grid.virtual)]
        flags += ["--overlap-p2p-communication-warmup-flush"]
    if grid.counts_ends[0]:
        flags.append("--account-for-embedding-in-pipeline-split")
    if grid.counts_ends[1]:
        flags.append("--account-for-loss-in-pipeline-split")
    if grid.mode == "selective":
        flags += ["--recompute-granularity", "selective"]
    elif grid.mode == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    return tuple(flags)
