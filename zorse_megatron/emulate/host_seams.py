"""What an emulated rank rebinds for copies to the host, one record each."""

import functools
from collections.abc import Callable
from typing import Any

from zorse_megatron.adapter.rebind import Rebinding
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS
from zorse_megatron.emulate.pacer import Pacer

_LINK = "zorse_megatron.runtime.host_memory:HostLink"


def host_records(pacer: Pacer) -> list[Rebinding]:
    """Return the hooks into this package's runtime and adapter."""
    record = functools.partial(
        Rebinding, versions=MEGATRON_VERSIONS, test="tests/megatron/test_emulation.py"
    )
    host = pacer.host
    return [
        *(
            record(
                target=f"{_LINK}.{name}",
                make=functools.partial(_copying, pacer, to_host=to_host),
                parameters=parameters,
                why="a copy takes the time of the real model's bytes on the emulated GPU's link",
                delete_when="HostLink takes an object that makes copies",
            )
            for name, to_host, parameters in (
                ("start_to_host", True, ("self", "source", "host")),
                ("start_from_host", False, ("self", "host", "target")),
            )
        ),
        record(
            target=f"{_LINK}.hold_back",
            make=lambda _stock: lambda _link, copied: host.hold_back(copied),
            parameters=("self", "copied"),
            why="a rank's clock stands still for copies where a CUDA stream would wait",
            delete_when="HostLink takes an object that makes copies",
        ),
        record(
            target="zorse_megatron.runtime.activation_offload:ActivationOffload._send",
            make=functools.partial(_sending, pacer),
            parameters=("self", "key", "memories"),
            why="what a tiny forward kept stands for what the real one keeps",
            delete_when="the runtime says what it sends, and not only which tensors",
        ),
        record(
            target="zorse_megatron.adapter.host_state:HostState.__init__",
            make=functools.partial(_counting, pacer),
            parameters=("self", "optimizer", "link", "optimizer_state", "on_change"),
            why="pieces of the tiny state stand for pieces of the real one",
            delete_when="the runtime says what it sends, and not only which tensors",
        ),
        record(
            target="zorse_megatron.adapter.state_pieces:_piece_sizes",
            make=lambda _stock: host.piece_sizes,
            parameters=("shards",),
            why="the tiny state is stepped in as many pieces as the real one",
            delete_when="the number of pieces is part of the plan",
        ),
    ]


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
