"""What a session does about memory: its rank's ledger, and what it says where the host is full."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.memory.memory_probes import (
    KeptActivations,
    copied_gradient_bytes,
    gradient_bytes,
    parameter_bytes,
    reduction_bytes,
    state_bytes,
)
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.host_link import HostLink, HostMemoryFull
from zorse_megatron.runtime.memory_ledger import MemoryLedger, out_of_host_memory


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
