"""Every name of Megatron that an emulated run rebinds, one record each.

They are applied before training starts, with a plan or without one, and only look on: what stock
and this package compute stays the same.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from zorse_megatron.adapter.model_parts import ModelParts, parts_of
from zorse_megatron.adapter.rebind import Rebinding
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS

_TEST = "tests/megatron/test_emulation.py"


def emulation_records(
    *,
    watch: Callable[[ModelParts], None],
    around_step: Callable[[], AbstractContextManager[None]],
) -> list[Rebinding]:
    """`watch` gets every chunk of the model when it is wrapped, `around_step` surrounds a step."""
    return [
        Rebinding(
            target="megatron.core.distributed.distributed_data_parallel:"
            "DistributedDataParallel.__init__",
            make=functools.partial(_watching, watch),
            parameters=(
                *("self", "config", "ddp_config", "module"),
                *("disable_bucketing", "pg_collection", "full_param_layout"),
            ),
            why="layers are paced, and buffers are counted as the real model's, from the moment "
            "they are in place; both stock's wrapper and ours pass here",
            versions=MEGATRON_VERSIONS,
            test=_TEST,
            delete_when="pretrain calls a hook with the wrapped model before the optimizer is made",
        ),
        Rebinding(
            target="megatron.training.training:train_step",
            make=functools.partial(_surrounded, around_step),
            parameters=(
                *("forward_step_func", "data_iterator", "model", "optimizer"),
                *("opt_param_scheduler", "config", "forward_backward_func", "iteration"),
                *("pg_collection", "p2p_communicator"),
            ),
            why="the emulated clock starts with the first step and is read at the end of each",
            versions=MEGATRON_VERSIONS,
            test=_TEST,
            delete_when="pretrain takes a callback for each step",
        ),
    ]


def _watching(watch: Callable[[ModelParts], None], stock: Callable[..., None]) -> Any:
    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        watch(parts_of(self))

    return __init__


def _surrounded(
    around_step: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(stock)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        with around_step():
            return stock(*args, **kwargs)

    return train_step
