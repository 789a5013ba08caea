"""How the buckets of `ddp.UnevenDistributedDataParallel` are laid out, cut and grouped."""

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from zorse_megatron.adapter.data_parallel.bucket_groups import UnevenBucketGroup
from zorse_megatron.adapter.data_parallel.set_sums import set_sums_of
from zorse_megatron.schedules.shards import shard_bounds


def bucket_per_layer(module: torch.nn.Module, ddp_config: Any, collection: Any) -> Any:
    """Stock's layouts of each layer, of the embedding and of the head, one behind the other.

    So each can be used when it is there. Stock's own cut by size alone would put a small head and
    the end of the last layer in one bucket, and so on down to the first layer.
    """

    def layout(parameters: Sequence[torch.nn.Parameter]) -> FullParamLayout:
        return DistributedOptimizer.compute_full_param_layout(
            list(parameters),
            None,
            collection.intra_dp_cp.size(),
            ddp_config,
            expert_data_parallel_world_size=collection.intra_expt_dp.size(),
        )

    sections = _sections(module)
    whole = layout([parameter for section in sections for parameter in section])
    backwards = [layout(section) for section in reversed(sections)]  # as stock fills buffers
    return FullParamLayout(
        layouts={
            key: dataclasses.replace(
                _joined([each.layouts[key] for each in backwards if key in each.layouts]),
                param_indices=of_all.param_indices,
                num_optimizer_shards=of_all.num_optimizer_shards,
            )
            for key, of_all in whole.layouts.items()
        }
    )


def _sections(module: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """Trainable parameters in a forward's order: each layer's, what comes before, what behind.

    What has no matrix, such as a final norm beside a tied embedding, goes with what precedes it.
    """
    layer_of = {
        id(parameter): number
        for number, layer in enumerate(module.modules())
        if isinstance(layer, BaseTransformerLayer)
        for parameter in layer.parameters()
    }
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    sections: list[list[torch.nn.Parameter]] = []
    for _, found in groupby(trained, key=lambda parameter: layer_of.get(id(parameter))):
        section = list(found)
        if sections and all(parameter.dim() < 2 for parameter in section):
            sections[-1] += section
        else:
            sections.append(section)
    return sections


def _joined(layouts: Sequence[PerBufferParamLayout]) -> PerBufferParamLayout:
    """Buckets of several buffers in one; each ends where any bucket may begin."""
    joined = PerBufferParamLayout()
    for each in layouts:
        number = len(joined.bucket_indices)
        first = joined.bucket_indices[-1][1] if number else 0
        for parameter, (start, stop, bucket) in each.param_index_map.items():
            joined.param_index_map[parameter] = first + start, first + stop, number + bucket
        joined.bucket_indices += [
            (first + start, first + stop) for start, stop in each.bucket_indices
        ]
        joined.per_bucket_numel_unpadded += each.per_bucket_numel_unpadded
    return joined


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
