"""A rank's chunks, built one after the other, so that one at a time is unsharded.

Stock builds all chunks of a rank, then wraps all, and holds unsharded parameters and gradients of
all. Here a chunk is built and wrapped, and if the list gathers it before use it is cut down to this
rank's shard, before the next one is built. Initial weights come last and go where the shards are.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.initialize import _set_random_seed, set_jit_fusion_options

from zorse_megatron.adapter.checkpoint.saved_parameters import owned_entries, unsharded_entries
from zorse_megatron.adapter.data_parallel.ddp import UnevenDistributedDataParallel
from zorse_megatron.adapter.data_parallel.unlike_replicas import UnlikeReplicas
from zorse_megatron.adapter.groups.process_groups import PipelinePosition, at_chunk
from zorse_megatron.adapter.model.initial_weights import copy_single_process_weights
from zorse_megatron.adapter.session import PlanSession
from zorse_megatron.runtime.host_link import copied_to_host


def build_one_by_one(
    session: PlanSession, model_config: Any, stock: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what takes the place of `unimodal_build_distributed_models` (`stock`).

    `model_config`: the script's (`cfg_container.model`). Stock's pre-wrap hooks see one chunk at a
    time.
    """

    def unimodal_build_distributed_models(
        build_model_func: Callable[..., Any],
        transformer_config: Any,
        pg_collection: Any,
        *args: Any,
        **kwargs: Any,
    ) -> list[Any]:
        wrapped = []
        for chunk in session.chunks:
            there = at_chunk(pg_collection, chunk, session.num_chunks)
            with session.stages.at_chunk(chunk):
                wrapped += stock(build_model_func, transformer_config, there, *args, **kwargs)
        if get_args().perform_initialization:
            _set_initial_weights(session, model_config, wrapped)
        return wrapped

    return unimodal_build_distributed_models


def wrap_chunk(session: PlanSession, *, module: Any, pg_collection: Any, **kwargs: Any) -> Any:
    """Wrap one chunk, resident or sharded as the plan's list has it; a sharded one is released."""
    chunk = pg_collection.pp.rank()
    _leave_device(module)
    if session.weight_gradients is not None:
        session.weight_gradients.watch(module)
    wrapped = UnevenDistributedDataParallel(
        module=module,
        pg_collection=pg_collection,
        shard_weights=session.shard_weights,
        sharded=chunk in session.sharded_chunks,
        link=session.host_link,
        comm_dtype=session.comm_dtype,
        is_mixed=session.is_mixed,
        place=session.place,
        unlike=UnlikeReplicas.of(session.plan.groups[session.plan.group_of_rank(session.rank)]),
        delays_weights=session.weight_gradients is not None,
        regions=session.groups.regions,
        **kwargs,
    )
    if wrapped.shards is not None:
        wrapped.shards.release()
        if chunk in session.chunks_in_host:
            with session.before_first_step():
                wrapped.shards.offload()
    # Training loop and checkpoints ask a model and mean the rank. Layers and the 16-bit wrapper,
    # which mean the chunk, have taken its groups when they were built.
    model = unwrap_model(module)
    wrapped.pg_collection = model.pg_collection = session.collection
    model.sharded_state_dict = partial(
        _sharded_state_dict, session, wrapped, chunk, model.sharded_state_dict
    )
    return wrapped


def _leave_device(module: torch.nn.Module) -> None:
    """Move parameters to the host: stock copies them into new memory on the device.

    So a chunk is there once while it is wrapped, not twice.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = copied_to_host(parameter)


def _sharded_state_dict(
    session: PlanSession,
    wrapped: Any,
    chunk: int,
    stock: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stock's, which looks up a chunk's first layer by the process-wide stage."""
    with session.stages.at_chunk(chunk):
        found = stock(*args, **kwargs)
    if wrapped.shards is None and session.saves_blocks:
        return unsharded_entries(wrapped, found, is_mixed=session.is_mixed)
    return owned_entries(wrapped, found, is_mixed=session.is_mixed)


def _set_initial_weights(session: PlanSession, model_config: Any, chunks: list[Any]) -> None:
    local_sizes = session.local_sizes
    with nullcontext() if local_sizes is None else local_sizes.whole():
        copy_single_process_weights(
            dict(zip(session.layers, chunks, strict=True)),
            model_config=model_config,
            dtype=get_args().zorse_job_dtype,
            collection=session.collection,
            seed_everything=partial(_seed_as_single_process, session.groups.alone),
            keep_exactly=session.is_mixed,
        )


def _seed_as_single_process(alone: dist.ProcessGroup) -> None:
    """Bring all random generators to where a stock single process has them before it builds."""
    args = get_args()
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
