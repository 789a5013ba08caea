"""How the buckets of `ddp.UnevenDistributedDataParallel` are laid out, cut and grouped."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from zorse_megatron.adapter.data_parallel.bucket_groups import UnevenBucketGroup
from zorse_megatron.adapter.data_parallel.set_sums import set_sums_of
from zorse_megatron.schedules.shards import shard_bounds


def bucket_per_layer(module: torch.nn.Module, ddp_config: Any, collection: Any) -> Any:
    """Stock's layout with buckets of a layer each, so that a layer can be used when it is there."""
    layers = [m for m in module.modules() if isinstance(m, BaseTransformerLayer)]
    sizes = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers]
    return DistributedOptimizer.compute_full_param_layout(
        [p for p in module.parameters() if p.requires_grad],
        min(sizes, default=None),
        collection.intra_dp_cp.size(),
        ddp_config,
        expert_data_parallel_world_size=collection.intra_expt_dp.size(),
    )


def cut_buckets(
    buffers: Sequence[Any], shard_weights: Sequence[float], group: dist.ProcessGroup
) -> None:
    """Set what each rank of the data-parallel group owns of each bucket.

    Raises ValueError unless there is a weight for each rank.
    """
    if len(shard_weights) != group.size():
        raise ValueError(
            f"found {len(shard_weights)} shard weights for a data-parallel group of "
            f"{group.size()} ranks; expected one per rank"
        )
    for buffer in buffers:
        for bucket in buffer.buckets:
            bucket.shard_bounds = shard_bounds(bucket.grad_data.numel(), shard_weights)


def uneven_bucket_groups(ddp: Any) -> list[UnevenBucketGroup]:
    """What takes the place of the bucket groups that stock's `__init__` made for `ddp`."""
    groups = [
        UnevenBucketGroup(
            group.buckets,
            ddp.ddp_config,
            ddp.intra_dp_cp_group,
            ddp.comm_dtype,
            set_group=None if ddp.place is None else ddp.place.group,
            regions=ddp.regions,
        )
        for group in ddp.bucket_groups
    ]
    summed = set_sums_of(ddp.module, ddp.config)
    for group in groups:
        group.set_sums = tuple(p for b in group.buckets for p in b.params_list if p in summed)
    if ddp.has_uneven_parts and groups:
        # Ranks of the set have other buckets then; but the first one is reduced when all
        # gradients are there.
        for group in groups:
            group.set_sums = ()
        groups[0].set_sums = tuple(p for p in ddp.module.parameters() if p in summed)
    return groups
