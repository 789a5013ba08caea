"""Hooks of an emulated rank into copies to the host."""

import functools
from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.patches import emulation
from zorse_megatron.adapter.patches.rebind import Replacements
from zorse_megatron.emulate.pacer import Pacer


def host_hooks(pacer: Pacer) -> Replacements:
    """Return the hooks into this package's runtime and adapter."""
    host = pacer.host
    return {
        emulation.START_TO_HOST: functools.partial(_copying, pacer, to_host=True),
        emulation.START_FROM_HOST: functools.partial(_copying, pacer, to_host=False),
        emulation.HOLD_BACK: lambda _stock: lambda _link, copied: host.hold_back(copied),
        emulation.SEND_ACTIVATIONS: functools.partial(_sending, pacer),
        emulation.KEEP_STATE: functools.partial(_counting, pacer),
        emulation.PIECE_SIZES: lambda _stock: host.piece_sizes,
    }


def _copying(pacer: Pacer, stock: Callable[..., Any], *, to_host: bool) -> Callable[..., Any]:
    @functools.wraps(stock)
    def start(link: Any, source: Any, target: Any) -> Any:
        stock(link, source, target)
        return pacer.host.start(source if to_host else target, to_host=to_host)

    return start


def _sending(pacer: Pacer, stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def send(offload: Any, key: Any, memories: Any) -> None:
        pacer.host.add_activations(memories, pacer.forward_bytes)
        stock(offload, key, memories)

    return send


def _counting(pacer: Pacer, stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def __init__(host_state: Any, *args: Any, **kwargs: Any) -> None:
        stock(host_state, *args, **kwargs)
        pacer.host.add_state(host_state)

    return __init__
