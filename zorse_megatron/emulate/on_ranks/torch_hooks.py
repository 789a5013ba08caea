"""Hooks of an emulated rank into torch.distributed."""

import functools
from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.patches import emulation
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.emulate.on_ranks.backend import BACKEND, WRAPPED


def seam_hooks() -> Replacements:
    """Return them; for a job whose backend is the emulated one."""
    return {
        emulation.INIT_PROCESS_GROUP: _on_emulated,
        emulation.NEW_GROUP: _on_emulated,
        emulation.GET_BACKEND: _named_as_wrapped,
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
