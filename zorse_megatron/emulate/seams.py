"""Hooks of an emulated rank into torch.distributed and into collectives of the runtime."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zorse_megatron.adapter.patches import emulation
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.emulate.backend import BACKEND, WRAPPED, EmulatedGroup
from zorse_megatron.emulate.messages import CollectiveKind


def seam_hooks() -> Replacements:
    """Return the hooks into torch.distributed and into this package's runtime."""
    return {
        emulation.INIT_PROCESS_GROUP: _on_emulated,
        emulation.NEW_GROUP: _on_emulated,
        emulation.GET_BACKEND: _named_as_wrapped,
        emulation.START_EXCHANGE: _exchanged,
        emulation.START_REDUCE_SCATTER: functools.partial(_bundled, "reduce_scatter"),
        emulation.START_ALL_GATHER: functools.partial(_bundled, "all_gather"),
    }


def _on_emulated(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        return stock(*args, backend=BACKEND if backend == WRAPPED else backend, **kwargs)

    return call


def _named_as_wrapped(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def get_backend(*args: Any, **kwargs: Any) -> str:
        name = stock(*args, **kwargs)
        return WRAPPED if name == BACKEND else name

    return get_backend


def _bundled(kind: CollectiveKind, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def start(full: torch.Tensor, parts: Sequence[torch.Tensor], group: Any) -> Any:
        call = functools.partial(stock, full, parts, group)
        if not isinstance(group, EmulatedGroup):
            return call()
        return group.bundle(kind, group.sizes.part_bytes(parts), call)

    return start


def _exchanged(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def start(
        full: torch.Tensor,
        parts: Sequence[torch.Tensor],
        group: Any,
        sent: torch.Tensor,
        received: torch.Tensor,
    ) -> Any:
        call = functools.partial(stock, full, parts, group, sent, received)
        if not isinstance(group, EmulatedGroup):
            return call()
        whole, narrow = full.element_size(), sent.element_size()
        sizes = [size * narrow // whole for size in group.sizes.part_bytes(parts)]
        return group.bundle("exchange", sizes, call)

    return start
