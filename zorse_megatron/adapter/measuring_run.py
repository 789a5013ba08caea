"""Starts a training command far enough to have its model and optimizer, and hands them over."""

import functools
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zorse_megatron.adapter import cpu_mode
from zorse_megatron.adapter.patches.rebind import REGISTRY
from zorse_megatron.adapter.start_checks import checked_gpu_flags
from zorse_megatron.flags.installed_software import with_cpu_flags


class Built(BaseException):
    """The model has been built and measured; nothing is to be trained."""


def run_until_built(
    script: Path | None, megatron_flags: Sequence[str], use: Callable[[Any, Any], None]
) -> None:
    """Run a script, or our GPT entry, with Megatron's flags until `use(model, optimizer)`.

    The model is wrapped as for training. For a process of its own: what Megatron sets up stays.
    Raises FlagError or SeamError where Megatron cannot be used so.
    """
    flags = checked_gpu_flags(megatron_flags, node=socket.gethostname())
    if cpu_mode.needed():
        cpu_mode.enable()
        flags = with_cpu_flags(flags)
    from zorse_megatron.adapter.start import activate, run_entry

    activate(None)
    REGISTRY.apply({"setup_when_measuring": functools.partial(_use_what_is_built, use)})
    try:
        run_entry(script, flags)
    except Built:
        return


def _use_what_is_built(
    use: Callable[[Any, Any], None], stock: Callable[..., Any]
) -> Callable[..., Any]:
    from megatron.training import get_args

    from zorse_megatron.adapter.model.expert_layers import with_plan_layers

    @functools.wraps(stock)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        # Layers of experts are those of a plan; micro-batches of any size are measured.
        hooks = {"experts_spec": functools.partial(with_plan_layers, 1, None, None)}
        with REGISTRY.applied({} if get_args().num_experts is None else hooks):
            (model,), optimizer, _scheduler = stock(*args, **kwargs)
            use(model, optimizer)
        raise Built

    return setup_model_and_optimizer
