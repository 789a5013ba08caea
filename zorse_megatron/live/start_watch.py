"""Forks a process into a rank and its watcher.

`start` forks each rank off a small process that stays its parent, and watches it: it learns at once
how the rank ends, whatever the rank is doing, and outlives it. These watchers are joined to that of
rank 0, which decides who is to blame (`root_cause`), has all ranks ended, and prints one line.
"""

import contextlib
import gc
import os
import resource
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn

from zorse_megatron.live.hub import Hub, Member
from zorse_megatron.live.listener import TOKEN_CHARACTERS, Listener
from zorse_megatron.live.root_cause import Timeouts
from zorse_megatron.live.watched_rank import SharedState, WatchedRank, watch_parent
from zorse_megatron.live.watcher import FORWARDED, Watcher, forward
from zorse_megatron.processes import end_with_parent


def watched(
    environment: Mapping[str, str],
    *,
    describe: Callable[[int], str],
    host: str,
    timeouts: Timeouts | None = None,
    saved: Callable[[], str] = str,
) -> tuple[WatchedRank, str]:
    """Let a child of this process be the rank, watched by this process; return in the child.

    `environment` has torchrun's variables; `saved` tells what training can go on from. Returns the
    rank's end of the watch, and on rank 0 what the watchers of the other ranks need (see
    `exchange`), else "". A job of one rank is not watched. To be called before CUDA is initialised,
    which does not survive a fork.

    Of torchrun's processes none outlives its agent: one that is killed cannot end them, and they
    would train on beside those of the next start. Who starts ranks by hand may leave them.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        end_with_parent()
    timeouts = timeouts or Timeouts()
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size == 1:
        return WatchedRank(None, timeouts), ""
    shared = SharedState()
    shared.phase.write("at its start")
    # The first rank of each node; of the hub's own, which is gone then, the second.
    speaks = rank == 1 or environment.get("LOCAL_RANK") == "0"
    post: Hub | Member = Member(
        rank, timeouts=timeouts, describe=describe, host=host, speaks=speaks
    )
    address = ""
    if rank == 0:
        listener, address = _listener(environment)
        post = Hub(
            world_size, listener, timeouts=timeouts, describe=describe, host=host, tell=_tell
        )
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process, passed_on = _fork()
    if process == 0:
        if isinstance(post, Hub):
            post.listener.close()
        watch_parent(shared, timeouts, parent)
        return WatchedRank(shared, timeouts), address
    _watch(
        Watcher(
            rank=rank,
            process=process,
            shared=shared,
            post=post,
            timeouts=timeouts,
            find_hub=partial(_find_hub, shared, address),
            passed_on=passed_on,
            saved=saved,
        )
    )


def _listener(environment: Mapping[str, str]) -> tuple[Listener, str]:
    """The hub's port, and what others need for it: "port token"."""
    token = secrets.token_hex(TOKEN_CHARACTERS // 2)
    is_one_node = environment["WORLD_SIZE"] == environment.get("LOCAL_WORLD_SIZE")
    listener = Listener(environment["MASTER_ADDR"], 0, token, is_one_node=is_one_node)
    if listener.note:
        _tell(listener.note)
    return listener, f"{listener.port} {token}"


def _tell(line: str) -> None:
    """Show a line whole, also where a rank is in the middle of one; by no lock of the rank's."""
    with contextlib.suppress(OSError):
        os.write(2, f"zorse: note: {line}\n".encode())


def _fork() -> tuple[int, list[int]]:
    """`os.fork`, and `forward`; no signal comes between it and the watcher's handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    process = os.fork()
    passed_on = forward(process) if process else []
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return process, passed_on


def _watch(watcher: Watcher) -> NoReturn:
    gc.disable()  # what it would free are the rank's things
    post = watcher.post
    _let_go_of_files(keep=post.listener.fileno() if isinstance(post, Hub) else -1)
    _allow_many_files()
    watcher.run()


def _find_hub(shared: SharedState, hub_address: str) -> int:
    """Start a process that finds the hub in place of a rank that has not come so far."""
    process = os.fork()
    if process:
        return process
    try:
        from zorse_megatron.live.hub_address import exchange_for_dead_rank

        exchange_for_dead_rank(shared, hub_address)
    finally:
        os._exit(0)


def _allow_many_files() -> None:
    """Most systems let a process have 1,024 files unless it asks for more; a job may have more
    ranks, each with a connection to the hub.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _let_go_of_files(keep: int) -> None:
    """Close what the rank has open, or its connections would outlive it.

    The numbers stay taken: Python objects that still have them might close them for others.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        if number > 2 and number not in (keep, nothing):
            try:
                os.fstat(number)
            except OSError:  # that of the listing itself
                continue
            os.dup2(nothing, number, inheritable=False)
