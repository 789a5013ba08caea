"""A rank's chunks, built one after the other, so that one at a time is unsharded.

Stock builds all chunks of a rank, then wraps all, and holds unsharded parameters and gradients of
all. Here a chunk is built and wrapped, and if the list gathers it before use it is cut down to this
rank's shard, before the next one is built. Initial weights come last and go where the shards are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.initialize import _set_random_seed, set_jit_fusion_options

from zorse_megatron.adapter.checkpoint.adapters import AdapterRun
from zorse_megatron.adapter.checkpoint.saved_parameters import saved_entries
from zorse_megatron.adapter.data_parallel.ddp import UnevenDistributedDataParallel
from zorse_megatron.adapter.groups.process_groups import (
    PipelinePosition,
    at_chunk,
    shard_weights_by_group_rank,
)
from zorse_megatron.adapter.loss import comm_dtype_of
from zorse_megatron.adapter.memory import before_first_step
from zorse_megatron.adapter.model.initial_weights import copy_single_process_weights, set_value
from zorse_megatron.adapter.model.lora import add_adapters, initial_values
from zorse_megatron.adapter.model.overlapped_layer import OverlappedLayer
from zorse_megatron.adapter.model.uneven_tp_shards import LocalSizes
from zorse_megatron.adapter.model.weight_gradients import WeightGradients
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.plan.plan import has_equal_tp_shards
from zorse_megatron.runtime.host_link import HostLink, copied_to_host
from zorse_megatron.schedule.actions import chunks_left_in_host
from zorse_megatron.schedule.tensor_parallel_parts import has_uneven_tp_shards


@dataclass(frozen=True, kw_only=True)
class ChunkBuilder:
    """Takes the place of stock's builder and wrapper."""

    at: RankPlan
    model_config: Any
    """The script's (`cfg_container.model`)."""
    local_sizes: LocalSizes | None
    """Of a rank of a TP group with uneven TP shards."""
    link: HostLink | None
    """For what the plan offloads."""
    weight_gradients: WeightGradients | None
    """Of a group that splits backwards."""
    are_replaced: bool
    """Whether a checkpoint, or the run before a move, brings all weights."""
    adapters: AdapterRun | None
    """Of a run that trains adapters alone."""

    def one_by_one(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of `unimodal_build_distributed_models` (`stock`).

        Stock's pre-wrap hooks see one chunk at a time.
        """

        def unimodal_build_distributed_models(
            build_model_func: Callable[..., Any],
            transformer_config: Any,
            pg_collection: Any,
            *args: Any,
            **kwargs: Any,
        ) -> list[Any]:
            wrapped = []
            build = partial(self._build, build_model_func)
            for chunk in self.at.chunks:
                there = at_chunk(pg_collection, chunk, self.at.num_chunks)
                with self.at.stages.at_chunk(chunk):
                    wrapped += stock(build, transformer_config, there, *args, **kwargs)
            self._set_adapters(wrapped)
            if get_args().perform_initialization:
                self._set_initial_weights(wrapped)
            return wrapped

        return unimodal_build_distributed_models

    def _build(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = stock(*args, **kwargs)
        layers = unwrap_model(model).decoder.layers
        if len(layers) and isinstance(layers[-1], OverlappedLayer):
            layers[-1].hands_on = False
        if self.adapters is not None:
            add_adapters(model, self.adapters.lora)
        return model

    def wrap(self, *, module: Any, pg_collection: Any, **kwargs: Any) -> Any:
        """Wrap a chunk, resident or sharded as the plan's list has it; a sharded one is released.

        The counterpart of stock's `DistributedDataParallel`.
        """
        with _on_default_stream():
            return self._wrapped(module, pg_collection, **kwargs)

    def _wrapped(self, module: Any, pg_collection: Any, **kwargs: Any) -> Any:
        at, chunk = self.at, pg_collection.pp.rank()
        _leave_device(module)
        if self.weight_gradients is not None:
            self.weight_gradients.watch(module)
        wrapped = UnevenDistributedDataParallel(
            module=module,
            pg_collection=pg_collection,
            shard_weights=shard_weights_by_group_rank(at.plan, rank=at.rank),
            sharded=chunk in at.sharded_chunks,
            link=self.link,
            comm_dtype=comm_dtype_of(
                at.plan,
                at.rank,
                sequence_length=at.sequence_length,
                loss_divisor=at.batch.loss_divisor,
            ),
            is_mixed=at.is_mixed,
            place=at.place or at.expert_place,
            mixed_group=None if has_equal_tp_shards(at.group) else at.group,
            delays_weights=self.weight_gradients is not None,
            # Between groups, ranks whose backward waits for the device (for memory, say) would
            # launch its reductions and messages in another order than the others, and hang.
            # Weights of experts have no gradient of their own that stock's overlap would ask for.
            reduces_in_list=len(at.plan.groups) > 1 or get_args().num_experts is not None,
            regions=at.groups.regions,
            **kwargs,
        )
        if wrapped.shards is not None:
            wrapped.shards.reshard()
            if chunk in chunks_left_in_host(at.actions):
                with before_first_step(at.rank, self.link):
                    wrapped.shards.offload()
        # Training loop and checkpoints ask a model and mean the rank. Layers and the 16-bit
        # wrapper, which mean the chunk, have taken its groups when they were built.
        model = unwrap_model(module)
        wrapped.pg_collection = model.pg_collection = at.collection
        model.sharded_state_dict = partial(
            self._sharded_state_dict, wrapped, chunk, model.sharded_state_dict
        )
        return wrapped

    def _sharded_state_dict(
        self, wrapped: Any, chunk: int, stock: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stock's, which looks up a chunk's first layer by the process-wide stage."""
        with self.at.stages.at_chunk(chunk):
            found = stock(*args, **kwargs)
        if self.adapters is not None:
            found = self.adapters.part_of(found)
        return saved_entries(
            wrapped, found, is_mixed=self.at.is_mixed, in_blocks=self._saves_blocks
        )

    @cached_property
    def _saves_blocks(self) -> bool:
        """Whether parameters are no regular grid of parts for some ranks of the job.

        The copies of a tied embedding are one tensor, so TP groups of two groups matter, too.
        """
        groups = self.at.plan.groups
        degrees = {replica.tp_degree for group in groups for replica in group.replicas}
        return len(degrees) > 1 or any(map(has_uneven_tp_shards, groups))

    def _set_initial_weights(self, models: list[Any]) -> None:
        layers = [self.at.plan.chunks[chunk].layers for chunk in self.at.chunks]
        with nullcontext() if self.local_sizes is None else self.local_sizes.whole():
            copy_single_process_weights(
                dict(zip(layers, models, strict=True)),
                model_config=self.model_config,
                dtype=get_args().zorse_job_dtype,
                collection=self.at.collection,
                seed_everything=self._seed_as_single_process,
                keep_exactly=self.at.is_mixed,
                must_be_alike=not self.are_replaced,
            )

    def _set_adapters(self, models: list[Any]) -> None:
        if self.adapters is None:
            return
        for chunk, model in zip(self.at.chunks, models, strict=True):
            first, _ = self.at.plan.chunks[chunk].layers
            for parameter, value in initial_values(model, first, get_args().seed):
                dtype = get_args().zorse_job_dtype
                set_value(model, parameter, value, dtype=dtype, keep_exactly=self.at.is_mixed)

    def _seed_as_single_process(self) -> None:
        """Bring all random generators to where a stock single process has them at its start."""
        args, alone = get_args(), self.at.groups.alone
        _set_random_seed(
            args.seed,
            te_rng_tracker=args.te_rng_tracker,
            inference_rng_tracker=args.inference_rng_tracker,
            pp_group=PipelinePosition(0, 1),
            dp_group=alone,
            tp_group=alone,
            ep_group=alone,
            etp_group=alone,
        )
        # Stock warms its fused functions up on random input between seeding and building.
        set_jit_fusion_options(tp_size=args.tensor_model_parallel_size)


@contextmanager
def _on_default_stream() -> Iterator[None]:
    """Stock wraps on a stream of its own (`build_distributed_models`).

    torch's allocator keeps what is allocated there for that stream: memory that a sharded chunk
    frees would serve nobody, and what has left the device before would not serve the buffers.
    """
    side, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    default.wait_stream(side)
    with torch.cuda.stream(default):
        yield
    side.wait_stream(default)


def _leave_device(module: torch.nn.Module) -> None:
    """Move parameters to the host: stock copies them into new memory on the device.

    So a chunk is there once while it is wrapped, not twice.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = copied_to_host(parameter)
