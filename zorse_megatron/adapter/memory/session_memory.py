"""What a session does about memory: the ledger of its rank, and the host memory of its node."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.memory.host_need import host_need, main_bytes
from zorse_megatron.adapter.memory.memory_probes import (
    KeptActivations,
    copied_gradient_bytes,
    gradient_bytes,
    parameter_bytes,
    reduction_bytes,
    state_bytes,
)
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.host_budget import (
    HostMemoryNeed,
    available_host_bytes,
    check_host_memory,
    node_name,
)
from zorse_megatron.runtime.host_link import HostLink, HostMemoryFull
from zorse_megatron.runtime.memory_ledger import MemoryLedger, out_of_host_memory
from zorse_megatron.schedules.actions import Action
from zorse_megatron.schema.plan.memory_settings import offloads_anything, settings_of_rank
from zorse_megatron.schema.plan.plan import Plan


def make_ledger(
    executor: Executor,
    models: Mapping[int, Any],
    optimizers: list[Any],
    *,
    rank: int,
    device: torch.device,
    activation_bytes: Callable[[], int],
    link: HostLink | None,
    watches: bool,
    limit_bytes: int | None,
) -> MemoryLedger:
    """The ledger of a rank; `watches`: whether to sample after every action."""
    on_gpu = device.type == "cuda"
    return MemoryLedger(
        {
            "parameters": partial(parameter_bytes, models),
            "gradients": lambda: gradient_bytes(models) + copied_gradient_bytes(optimizers),
            "optimizer state": partial(state_bytes, optimizers),
            "activations": activation_bytes,
            "buffers": lambda: executor.message_bytes + reduction_bytes(models),
        },
        rank=rank,
        samples=watches,
        limit_bytes=limit_bytes,
        allocated=partial(torch.cuda.max_memory_allocated, device) if on_gpu else None,
        in_host=lambda: dict(link.held) if link is not None else {},
    )


def watch_logits(models: list[Any], kept: KeptActivations) -> None:
    """Count logits while the loss is made of them: nothing saves them for a backward."""
    for model in models:
        head = getattr(unwrap_model(model), "output_layer", None)
        if head is not None:
            head.register_forward_hook(lambda _head, _inputs, outputs: kept.hold(outputs[0]))


def share_host_memory(
    plan: Plan,
    rank: int,
    link: HostLink | None,
    models: Mapping[int, Any],
    optimizers: Sequence[Any],
    *,
    actions: Sequence[Action],
    kept_bytes: Callable[[], Mapping[int, int]],
    limit_bytes: int | None,
) -> None:
    """Give this rank its part of its node's host memory; a collective call where any rank offloads.

    Raises HostMemoryError, on all ranks, where a node has too little.
    """
    if not offloads_anything(plan):
        return
    offload = settings_of_rank(plan, rank).offload
    held_bytes = link.host_bytes if link is not None else 0
    if offload.optimizer_state:
        held_bytes += main_bytes(optimizers)
    dist.barrier()  # what ranks have put there is there when they look at what is left
    mine = HostMemoryNeed(
        rank=rank,
        node=node_name(),
        by_category_bytes=host_need(
            offload,
            models,
            optimizers,
            actions=actions,
            kept_bytes=kept_bytes,
            pinned=link is not None and link.is_cuda,
        ),
        available_bytes=available_host_bytes(),
        held_bytes=held_bytes,
    )
    budgets = check_host_memory(gathered(mine), limit_bytes=limit_bytes)
    if link is not None:
        link.limit_bytes = budgets[rank]


@contextmanager
def before_first_step(rank: int, link: HostLink | None) -> Iterator[None]:
    """Say of what is sent to the host within the block where there is no room for it."""
    try:
        yield
    except HostMemoryFull as full:
        waiting = link.held if link is not None else {}
        raise out_of_host_memory(full, rank=rank, waiting=waiting) from full


def is_parameter(models: list[Any], address: int) -> bool:
    """Whether the storage at `address` is that of parameters of wrapped models."""
    return any(
        buffer.param_data.untyped_storage().data_ptr() == address
        for model in models
        for buffer in model.buffers
    )
