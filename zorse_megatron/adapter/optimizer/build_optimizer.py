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
from zorse_megatron.errors import FlagError, Problem


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
    is to wait in the host (`UnevenDistributedOptimizer.keep_in_host`). Raises FlagError for
    optimizers and options that cannot be kept.
    """
    problems = _problems(config)
    if problems:
        raise FlagError("The optimizer state cannot be cut into unequal shards", problems)
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


# (field, value it must have, flag): who would step, or when, would no longer be the shard's owner.
_UNSUPPORTED = (
    ("optimizer", "adam", "--optimizer"),
    ("optimizer_cpu_offload", False, "--optimizer-cpu-offload"),
    (
        "overlap_param_gather_with_optimizer_step",
        False,
        "--overlap-param-gather-with-optimizer-step",
    ),
    ("use_layer_wise_distributed_optimizer", False, "--use-layer-wise-distributed-optimizer"),
    ("reuse_grad_buf_for_mxfp8_param_ag", False, "--reuse-grad-buf-for-mxfp8-param-ag"),
)


def _problems(config: Any) -> list[Problem]:
    return [
        Problem(
            where=flag,
            found=repr(value),
            expected=repr(expected),
            remedy=f"Set {flag} adam." if field == "optimizer" else f"Remove {flag}.",
        )
        for field, expected, flag in _UNSUPPORTED
        if (value := getattr(config, field)) != expected
    ]
