"""Tells every rank where the watcher of rank 0 listens, through the store in which ranks meet."""

import contextlib
import os
import time
from datetime import timedelta

import torch.distributed as dist

from zorse_megatron.live.watched_rank import SharedState, WatchedRank

_KEY = "zorse/watch"
_LINGER_S = 60.0


def exchange(rank: WatchedRank, hub_address: str) -> dist.Store | None:
    """Give the other ranks the address of the hub, or take it. Waits for rank 0.

    Returns the store, which is to be kept while the process lives: torchrun's, or rank 0's own, of
    which `init_process_group` will find the server. Raises ConnectionError where rank 0 does not
    come in time (`Timeouts.meeting_s`).
    """
    if rank.shared is None:
        return None
    with contextlib.suppress(dist.DistError):
        store = _store(timedelta(seconds=rank.timeouts.meeting_s))
        rank.join(_exchanged(store, hub_address))
        return store
    # Not from the store's error: nobody is there who could name another rank as its cause.
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    raise ConnectionError(f"rank 0 has not come to {where} in {rank.timeouts.meeting_s:g} s")


def exchange_for_dead_rank(shared: SharedState, hub_address: str) -> None:
    """As `exchange`, in a process of its own in place of a rank that has ended before it could."""
    store = _store(timedelta(seconds=_LINGER_S))
    shared.address.write(_exchanged(store, hub_address))
    if hub_address:
        time.sleep(_LINGER_S)  # the others still have to read it


def _exchanged(store: dist.Store, hub_address: str) -> str:
    # torchrun keeps its store when it starts ranks again (--max-restarts).
    key = f"{_KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if hub_address:
        store.set(key, hub_address)
    return f"{os.environ['MASTER_ADDR']} {store.get(key).decode()}"


def _store(timeout: timedelta) -> dist.Store:
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        host_name=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0" and not served_by_agent,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=not served_by_agent,
    )
