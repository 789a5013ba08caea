"""Megatron's gradient buckets with shards of unequal size, reduced and gathered in one order.

Source: `megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup`, whose equal
shards and tensor collectives are replaced; when to communicate stays as it is there, except that
the order is fixed. Stock starts a bucket's reduction when its last gradient arrives, which is the
same order everywhere only as long as all ranks run the same backward. Here a rank may run none in
a step and start all of its reductions at the end, so buckets wait for the ones before them.
"""

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from megatron.core.utils import unwrap_model

from zorse_megatron.runtime.collectives import Works, all_gather_uneven, reduce_scatter_uneven
from zorse_megatron.runtime.hierarchical_collectives import (
    CommDtype,
    RegionGroups,
    all_gather_hierarchical,
    reduce_scatter_hierarchical,
    reduce_scatter_low_precision,
)
from zorse_megatron.schedule.shards import shard_bounds


class UnevenBucketGroup(_ParamAndGradBucketGroup):
    """Buckets that communicate together; each has `shard_bounds`, one interval per group rank.

    `shard_bounds` are positions in the bucket (see `schedule.shards`), set by
    `ddp.UnevenDistributedDataParallel`.
    """

    order: "BucketOrder"
    grad_reduce_handle: Any

    def __init__(
        self,
        buckets: list[Any],
        ddp_config: Any,
        group: dist.ProcessGroup,
        comm_dtype: CommDtype | None = None,
        *,
        tp_group: dist.ProcessGroup | None = None,
        regions: RegionGroups | None = None,
    ) -> None:
        """`comm_dtype`: how gradients are sent; None: as they are kept. `tp_group`: the ranks of
        the tensor-parallel group. `regions`: of a hierarchical group."""
        super().__init__(buckets, ddp_config, group, group.size())
        self.regions = regions
        self.group = group
        self.comm_dtype = comm_dtype
        self.tp_group = tp_group
        self.tp_sums: tuple[torch.nn.Parameter, ...] = ()
        """Parameters whose gradients are summed over the TP group."""
        self.grad_sync_requested = False
        self.grad_sync_dispatched = False
        self.began = False
        """Whether the list has started the reduction, which nobody has waited for."""
        self.noted_norms: list[torch.Tensor] = []
        """Of each bucket's own gradients, before they were reduced; see `ddp`."""

    def reset(self) -> None:
        """Prepare for the next step."""
        super().reset()
        self.grad_sync_requested = False
        self.grad_sync_dispatched = False

    # Gradients.

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce now, or with overlap_grad_reduce as soon as all buckets before this one have been.

        Raises RuntimeError when this step's reduction has been started already (not in the first
        step, in which stock ignores it too).
        """
        assert not force_all_reduce, "owners of unequal shards need their sums only"
        if not self.ddp_config.overlap_grad_reduce:
            self.dispatch_grad_sync()
            return
        if self.grad_sync_dispatched:
            if self.is_first_batch:
                return
            raise RuntimeError("this bucket's gradients are being reduced already in this step")
        self.grad_sync_requested = True
        self.order.dispatch_requested()

    def begin_grad_sync(self) -> None:
        """Start the reduction, unless a backward has; `finish_grad_sync` waits for it.

        Raises RuntimeError when a backward ran but left gradients out, as stock does.
        """
        if not self.ddp_config.overlap_grad_reduce:
            self._start_sums()
            self.began = True
        elif not self.grad_sync_dispatched and not self.grad_reduce_finished:
            self._refuse_partial_backward()
            self.order.dispatch_through(self)

    @property
    def reduction_bytes(self) -> int:
        """What the reduction under way holds beside the gradients."""
        return 0 if self.grad_reduce_handle is None else self.grad_reduce_handle.buffer_bytes

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reduction; start it first where nobody has.

        Raises RuntimeError when a backward ran but left gradients out, as stock does.
        """
        if self.began:
            self.began = False
            self._wait_for_sums()
            return
        overlap = self.ddp_config.overlap_grad_reduce
        if overlap and not self.grad_sync_dispatched and not self.grad_reduce_finished:
            self._refuse_partial_backward()
            self.order.dispatch_through(self)
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def _refuse_partial_backward(self) -> None:
        # No count at all means that this rank had no micro-batch in this step.
        if self.per_param_grad_ready_counts and not self.is_first_batch:
            raise RuntimeError(
                f"{len(self.per_param_grad_ready_counts)} of the bucket's {len(self.params)} "
                "parameters got a gradient in this step, unlike in the first one; with "
                "--overlap-grad-reduce a backward must reach the same parameters in every step"
            )

    def dispatch_grad_sync(self) -> None:
        """Start the reduction, out of `order`'s or stock's hands; waits unless it overlaps."""
        self._start_sums()
        self.grad_sync_dispatched = self.ddp_config.overlap_grad_reduce
        if not self.grad_sync_dispatched:
            self._wait_for_sums()

    def _start_sums(self) -> None:
        self.prepare_gradients()
        self.grad_reduce_handle = Works([self.reduce_bucket(bucket) for bucket in self.buckets])

    def _wait_for_sums(self) -> None:
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None

    def check_grads(self, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        """Note what stock checks here, which waits for the device, to be checked once per step."""
        if check_for_large:
            super().check_grads(check_for_nan_or_inf, check_for_large)
        else:
            self.noted_norms = [bucket.grad_data.norm(p=2) for bucket in self.buckets]

    def reduce_bucket(self, bucket: Any) -> Works:
        """Start to sum a bucket's gradients into the owners' shards."""
        full, bounds = bucket.grad_data, bucket.shard_bounds
        if self.regions is not None:
            return reduce_scatter_hierarchical(full, bounds, self.regions)
        if self.comm_dtype is None:
            return reduce_scatter_uneven(full, bounds, self.group)
        return reduce_scatter_low_precision(full, bounds, self.group, self.comm_dtype)

    def gather_bucket(self, bucket: Any) -> Works:
        """Start to copy all owners' shards of a bucket's parameters."""
        full, bounds = bucket.param_data, bucket.shard_bounds
        if self.regions is not None:
            return all_gather_hierarchical(full, bounds, self.regions)
        return all_gather_uneven(full, bounds, self.group)

    def prepare_gradients(self) -> None:
        """What stock's `start_grad_sync` does before it communicates.

        Left out is what goes with refused flags: graphs, local sums in fp32; and means over a
        group, as gradients are summed.
        """
        if self.tp_group is not None:
            sum_over_tp_group(self.tp_sums, self.tp_group)
        config = self.ddp_config
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            self.check_grads(
                check_for_nan_or_inf=config.check_for_nan_in_grad,
                check_for_large=config.check_for_large_grads,
            )


class BucketOrder:
    """The order of one model chunk's reductions: the same on all ranks of its group.

    From the first bucket to the last: buckets hold parameters from the output back to the input.
    """

    def __init__(self, groups: Sequence[UnevenBucketGroup]) -> None:
        self.groups = tuple(groups)
        for group in self.groups:
            group.order = self

    def dispatch_requested(self) -> None:
        """Start the reductions that are asked for and have no unstarted one before them."""
        for group in self.groups:
            if group.grad_sync_dispatched:
                continue
            if not group.grad_sync_requested:
                return
            group.dispatch_grad_sync()

    def dispatch_through(self, last: UnevenBucketGroup) -> None:
        """Start the reductions up to and including `last`, asked for or not."""
        for group in self.groups:
            if not group.grad_sync_dispatched:
                group.dispatch_grad_sync()
            if group is last:
                return


# How the buckets of `ddp.UnevenDistributedDataParallel` are laid out, cut and grouped.


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
            tp_group=ddp.tp_group,
            regions=ddp.regions,
        )
        for group in ddp.bucket_groups
    ]
    summed = tp_sums_of(ddp.module, ddp.config)
    for group in groups:
        group.tp_sums = tuple(p for b in group.buckets for p in b.params_list if p in summed)
    if ddp.has_uneven_tp_shards and groups:
        # Ranks of the TP group have other buckets then; but the first one is reduced when all
        # gradients are there.
        for group in groups:
            group.tp_sums = ()
        groups[0].tp_sums = tuple(p for p in ddp.module.parameters() if p in summed)
    return groups


# Gradients of what all ranks of a tensor-parallel group hold whole, but each saw a part of.
#
# With sequence parallelism a rank has its own positions only between layers, so its gradients of
# norms and of biases added there are of those alone; and norms of queries and keys have seen the
# rank's own heads only. They are summed over the TP group, once, before anything else is. All other
# gradients of what a TP group holds whole are the same on its ranks.
#
# Source:
# `megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads`, which
# sums after the data-parallel sum, when a plan's ranks have let go of what they do not own.


_OF_HEADS = ("q_layernorm", "k_layernorm")


def tp_sums_of(model: torch.nn.Module, config: Any) -> set[torch.nn.Parameter]:
    """The parameters whose gradients are to be summed over the TP group."""
    return {
        parameter
        for name, parameter in unwrap_model(model).named_parameters()
        if parameter.requires_grad
        and (
            (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
            or (config.qk_layernorm and any(norm in name for norm in _OF_HEADS))
        )
    }


@torch.no_grad()
def sum_over_tp_group(parameters: Sequence[Any], group: dist.ProcessGroup) -> None:
    """Sum their gradients over the TP group, in one message."""
    if not parameters:
        return
    gradients = [parameter.main_grad for parameter in parameters]
    together = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(together, group=group)
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, total in zip(gradients, together.split(sizes), strict=True):
        gradient.copy_(total.view_as(gradient))
