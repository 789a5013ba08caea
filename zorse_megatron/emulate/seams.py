"""What an emulated rank rebinds outside of Megatron, one record each."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zorse_megatron.adapter.rebind import Rebinding
from zorse_megatron.emulate.backend import BACKEND, WRAPPED, EmulatedGroup
from zorse_megatron.emulate.messages import CollectiveKind

_TEST = "tests/megatron/test_emulation.py"
_VERSIONS = ">=2.11"
_BUNDLED: dict[str, CollectiveKind] = {
    "_start_reduce_scatter": "reduce_scatter",
    "_start_all_gather": "all_gather",
}


def seam_records() -> list[Rebinding]:
    """Return the hooks into torch.distributed and into this package's runtime."""
    record = functools.partial(Rebinding, versions=_VERSIONS, test=_TEST)
    return [
        record(
            target="torch.distributed:init_process_group",
            make=_on_emulated,
            why="Megatron's --distributed-backend knows nccl and gloo only",
            delete_when="Megatron takes any registered backend",
        ),
        record(
            target="torch.distributed:new_group",
            make=_on_emulated,
            why="Megatron asks for gloo groups by name",
            delete_when="Megatron takes any registered backend",
        ),
        record(
            target="torch.distributed:get_backend",
            make=_named_as_wrapped,
            parameters=("group",),
            why="callers choose by this name how to call, and the calls are those of gloo",
            delete_when="the runtime asks groups for abilities and not for names",
        ),
        record(
            target="zorse_megatron.runtime.narrow_wire:_start_exchange",
            make=_exchanged,
            parameters=("full", "parts", "group", "sent", "received"),
            why="messages of the tiny model stand for parts of the real one, in 16 bits",
            delete_when="the emulated backend knows the sizes of messages by their parts",
        ),
        *(
            record(
                target=f"zorse_megatron.runtime.collectives:{name}",
                make=functools.partial(_bundled, kind),
                parameters=("full", "parts", "group"),
                why="over gloo this is one call for each owner; on GPUs it is one launch, whose "
                "time is that of one operation",
                delete_when="the runtime makes one call for both backends",
            )
            for name, kind in _BUNDLED.items()
        ),
    ]


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
