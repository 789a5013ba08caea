"""Megatron's flags for a layout of stock, on the tiny model that is trained in emulation."""

from zorse_megatron.emulate.jobs.tiny_shape import HIDDEN_SIZE
from zorse_megatron.planner.baselines.stock_flags import layout_flags
from zorse_megatron.planner.baselines.stock_grids import Grid
from zorse_megatron.planner.inputs.search_inputs import Inputs

# Stock's default: buckets of this many parameters (`DistributedDataParallel.__init__`).
_BUCKET_PARAMETERS = 40_000_000
_TINY_LAYER_PARAMETERS = 12 * HIDDEN_SIZE**2 + 13 * HIDDEN_SIZE


def flags_of_grid(inputs: Inputs, grid: Grid) -> tuple[str, ...]:
    """The layout's own flags; buckets of gradients are cut where those of the real model are."""
    scale = _TINY_LAYER_PARAMETERS / inputs.memory.layer_parameters()
    bucket = max(1, round(_BUCKET_PARAMETERS * scale))
    return *layout_flags(grid), "--ddp-bucket-size", str(bucket)
