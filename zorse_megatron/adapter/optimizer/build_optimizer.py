"""Build stock's optimizer for a model chunk, with shards of unequal size."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core import optimizer as stock

from zorse_megatron.adapter.checkpoint.saved_optimizer import CheckpointLayout
from zorse_megatron.adapter.optimizer.distributed_optimizer import UnevenDistributedOptimizer
from zorse_megatron.adapter.patches import under_plan
from zorse_megatron.adapter.patches.registry import REGISTRY


def build_uneven_optimizer(
    config: Any,
    model_chunks: Sequence[Any],
    config_overrides: Any = None,
    *,
    pg_collection: Any,
    checkpoint_layout: CheckpointLayout,
    state_waits: bool = False,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Return what `megatron.core.optimizer.get_megatron_optimizer` returns for these arguments.

    A collective call of all ranks. `model_chunks` are `UnevenDistributedDataParallel`;
    `pg_collection` has the groups of a plan (intra_dist_opt is the world). `config` is
    not changed; the optimizer gets a copy with use_distributed_optimizer. `state_waits`: its state
    is to wait in the host (`UnevenDistributedOptimizer.keep_in_host`).
    """
    uneven_class = partial(
        UnevenDistributedOptimizer, checkpoint_layout=checkpoint_layout, state_waits=state_waits
    )
    with REGISTRY.applied({under_plan.OPTIMIZER_CLASS: lambda _stock: uneven_class}):
        return stock.get_megatron_optimizer(
            replace(config, use_distributed_optimizer=True),
            list(model_chunks),
            config_overrides,
            use_gloo_process_groups=False,
            pg_collection=pg_collection,
            dump_param_to_param_group_map=dump_param_to_param_group_map,
        )
