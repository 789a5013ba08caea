"""Hooks of an emulated run into Megatron.

They are applied before training starts, with a plan or without one, and only look on: what stock
and this package compute stays the same.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from zorse_megatron.adapter.model.chunk_view import ChunkView, chunk_view_of
from zorse_megatron.adapter.patches import without_plan
from zorse_megatron.adapter.patches.rebind import Replacements


def emulation_hooks(
    *,
    watch: Callable[[ChunkView], None],
    around_step: Callable[[], AbstractContextManager[None]],
) -> Replacements:
    """`watch` gets every chunk of the model when it is wrapped, `around_step` surrounds a step."""
    return {
        without_plan.WRAP_MODEL: functools.partial(_watching, watch),
        without_plan.PACE_STEP: functools.partial(_surrounded, around_step),
    }


def _watching(watch: Callable[[ChunkView], None], stock: Callable[..., None]) -> Any:
    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        watch(chunk_view_of(self))

    return __init__


def _surrounded(
    around_step: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with around_step():
            return stock(*args, **kwargs)

    return train_step
