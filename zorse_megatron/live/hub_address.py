"""Tells every rank where the watcher of rank 0 listens, through the store in which ranks meet."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from zorse_megatron.live.hub import NAMED_S, answers
from zorse_megatron.live.watched_rank import SharedState, WatchedRank
from zorse_megatron.log import say

_KEY = "zorse/watch"
_LINGER_S = 60.0
_RETRY_S = 0.5


def exchange(rank: WatchedRank, hub_address: str) -> dist.Store | None:
    """Give the other ranks the address of the hub, or take it. Waits for rank 0.

    Returns a store with the keys of this start alone, which is to be kept while the process lives:
    rank 0's own, of which `init_process_group` will find the server, or torchrun's, which keeps it
    when it starts ranks again. Raises ConnectionError where rank 0 does not come in time
    (`Timeouts.meeting_s`).
    """
    if rank.shared is None:
        return None
    limit_s = rank.timeouts.meeting_s
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    with contextlib.suppress(dist.DistError, TimeoutError), _named_if_late(where, limit_s):
        store = _store(timedelta(seconds=limit_s))
        address = _exchanged(store, hub_address, limit_s)
        rank.join(address)
        return dist.PrefixStore(f"zorse/{address.split()[-1]}", store)
    # Not from the store's error: nobody is there who could name another rank as its cause.
    raise ConnectionError(f"rank 0 has not come to {where} in {limit_s:g} s")


@contextlib.contextmanager
def _named_if_late(where: str, limit_s: float) -> Iterator[None]:
    """Tell, on each node, that the block takes long: it waits for rank 0."""
    line = f"note: rank 0 has not come to {where} in {NAMED_S:g} s; the others wait {limit_s:g} s"
    late = threading.Timer(NAMED_S, say, [line], {"on_each_node": True})
    late.daemon = True
    if limit_s > NAMED_S:
        late.start()
    try:
        yield
    finally:
        late.cancel()


def exchange_for_dead_rank(shared: SharedState, hub_address: str) -> None:
    """As `exchange`, in a process of its own in place of a rank that has ended before it could."""
    store = _store(timedelta(seconds=_LINGER_S))
    shared.address.write(_exchanged(store, hub_address, _LINGER_S))
    if hub_address:
        time.sleep(_LINGER_S)  # the others still have to read it


def _exchanged(store: dist.Store, hub_address: str, limit_s: float) -> str:
    """Raises TimeoutError where no hub answers."""
    if hub_address:
        store.set(_KEY, hub_address)
        return f"{os.environ['MASTER_ADDR']} {hub_address}"
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        address = f"{os.environ['MASTER_ADDR']} {store.get(_KEY).decode()}"
        # A store that is kept has the hub of the start before, until this one's comes. torchrun
        # tells no number of the start: agents count their own, a new one from 0.
        if not _is_kept() or answers(address):
            return address
        time.sleep(_RETRY_S)
    raise TimeoutError


def _is_kept() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(timeout: timedelta) -> dist.Store:
    return dist.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0" and not _is_kept(),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=not _is_kept(),
    )
