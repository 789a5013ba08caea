"""The optimizer of a session: what it steps, where its state waits, and who calls its step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.training import get_args

from zorse_megatron.adapter.checkpoint.saved_optimizer import CheckpointLayout
from zorse_megatron.adapter.compute_dtype import take_exact, with_one_loss_scale
from zorse_megatron.adapter.memory import before_first_step, host_need
from zorse_megatron.adapter.optimizer.distributed_optimizer import build_uneven_optimizer
from zorse_megatron.adapter.optimizer.shard_update import Update, choose_update
from zorse_megatron.adapter.optimizer.streamed_gradients import count_zeros
from zorse_megatron.adapter.plan_run import RunOptions
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.adapter.tied_embeddings import TiedEmbedding
from zorse_megatron.kernels.dispatch import say_by_kind, why_not_triton
from zorse_megatron.plan.memory_settings import offloads_anything
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.host_budget import check_host_memory
from zorse_megatron.runtime.host_link import HostLink


def build_optimizer(
    at: RankPlan,
    asked: RunOptions,
    config: Any,
    models: list[Any],
    *,
    link: HostLink | None,
    on_change: Callable[[], None],
    **options: Any,
) -> Any:
    """Build what `get_megatron_optimizer` builds, to be stepped chunk by chunk.

    `models`: this rank's wrapped chunks; `link`: for what the plan offloads; `on_change`: called
    within a step whenever as much is on the device as there will be until the next call;
    `options`: stock's. A collective call.
    """
    optimizer = build_uneven_optimizer(
        with_one_loss_scale(config, at.dtypes),
        models,
        pg_collection=at.collection,
        checkpoint_layout=CheckpointLayout.of(distributed=get_args().use_distributed_optimizer),
        state_waits=at.offload.optimizer_state,
        **options,
    )
    (ours,) = optimizer.chained_optimizers
    take_exact(ours)
    ours.saves_experts_apart = get_args().zorse_experts_apart
    streams = _streams_gradients(at, asked.update, models)
    say_by_kind(choose_update(ours, asked.update, at.device, streams=streams), at.device)
    if any(group.grad_reduce_dtype for group in at.plan.groups):
        # Said now on every node: its first rank may be in a group that sends none in 16 bits.
        why_not_triton(at.device)
    _share_host_memory(at, models, ours, link, asked.host_memory_limit_bytes)
    if link is not None and (at.offload.parameters or at.offload.optimizer_state or streams):
        with before_first_step(at.rank, link):
            ours.keep_in_host(
                link,
                optimizer_state=at.offload.optimizer_state,
                state_fraction=at.offload.optimizer_state_fraction,
                gradients=streams,
                on_change=on_change,
            )
    if streams:
        optimizer.count_zeros = partial(count_zeros, optimizer)
    return optimizer


def parameters_norm(at: RankPlan, optimizer: Any) -> float:
    """The norm of all parameters of the model, each element once; a collective call.

    As stock's `calc_params_l2_norm`: with bf16 of the main parameters, else of the model's own.
    """
    square = torch.zeros((), dtype=torch.float64, device=at.device)
    for _, parameter, _, shard in optimizer.owned_shards:
        if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
            parameter, tp_group=at.groups.tp_group
        ):
            value = optimizer.read(shard)
            if parameter.dtype == torch.float16:
                value = value.half()
            square += value.float().norm().double().square().to(at.device)
    dist.all_reduce(square, group=at.groups.world)
    return square.sqrt().item()


def tied_embedding(at: RankPlan, models: Sequence[Any], optimizer: Any) -> TiedEmbedding | None:
    """What sums the tied embedding's gradient, on ranks that hold a copy; a collective call."""
    ends = {0, at.num_chunks - 1}
    if not at.tied_embeddings or len(ends) == 1:
        return None
    at_an_end = bool(ends & set(at.chunks))
    first, last = (at.plan.groups[at.plan.chunks[end].group] for end in (0, -1))
    tied = TiedEmbedding(
        model_chunks=models if at_an_end else [],
        first_ranks=sorted(first.ranks),
        last_ranks=sorted(last.ranks),
        group=at.groups.world,
    )
    tied.check_update_rule(optimizer)
    return tied if at_an_end else None


def _share_host_memory(
    at: RankPlan,
    models: list[Any],
    optimizer: Any,
    link: HostLink | None,
    limit_bytes: int | None,
) -> None:
    """Give this rank its part of its node's host memory; a collective call where any rank offloads.

    Before the first step. Raises HostMemoryError, on all ranks, where a node has too little.
    """
    if not offloads_anything(at.plan):
        return
    dist.barrier()  # what ranks have put there is there when they look at what is left
    mine = host_need(at, dict(zip(at.chunks, models, strict=True)), optimizer, link)
    budgets = check_host_memory(gathered(mine), limit_bytes=limit_bytes)
    if link is not None:
        link.limit_bytes = budgets[at.rank]


def _streams_gradients(at: RankPlan, update: Update, models: Sequence[Any]) -> bool:
    """Whether the step takes gradients chunk by chunk.

    It must where they come from the host. Where they are in 16 bits and the step is made in parts
    anyway, it then makes fp32 copies of a part at a time and not of all.
    """
    offload = at.offload
    in_parts = offload.parameters or offload.optimizer_state
    grads = (buffer.grad_dtype for chunk in models for buffer in chunk.buffers)
    return offload.gradients or (
        in_parts and update != "fused" and any(each.itemsize < 4 for each in grads)
    )
