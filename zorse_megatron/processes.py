"""What processes of a machine need: cores, free ports, cheap forks, an end with their parent."""

import contextlib
import ctypes
import gc
import os
import random
import signal
import socket
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path


def num_processors() -> int:
    """Those that this process may run on; where the system does not tell these, all there are."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# Where the ranks of a job on this machine meet.


# Below those that Linux hands out by itself (`ip_local_port_range`).
_PORTS = range(12_000, 29_000)


def free_port() -> int:
    """Return a port that is free now, and that the system gives to nobody who asks for any.

    So no connection of another process takes it before the caller does.
    """
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a rank, where all ranks of the job are on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


# Makes forks of a process that has torch and Megatron imported cheap, in time and in memory.
#
# For servers that fork one rank after another. Measured with 5 ranks that train for one step on two
# cores of a virtual machine: 0.55 CPU-s a rank before, 0.45 after.


HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h, since Linux 6.1


def prepare_forks() -> None:
    """To be called once all is imported, before the first fork."""
    gc.collect()
    gc.freeze()  # or the first collection in each child would copy its parent's pages
    _leave_objects_to_the_kernel()
    _use_huge_pages()


def _leave_objects_to_the_kernel() -> None:
    """Run no finalizer of an object of this process when a child ends.

    `torch.library.Library` unregisters its operators there: 8,000 pages copied to be freed.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _use_huge_pages() -> None:
    """Let the kernel map this process's memory by 2 MiB: a fork copies the map, not the memory.

    A fork takes 10 ms in place of 60 where 400 MB are mapped by 4 KiB. Where the kernel refuses,
    nothing changes.
    """
    libc = ctypes.CDLL(None)
    for start in _huge_pages():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(HUGE_PAGE_BYTES), _MADV_COLLAPSE)


def _huge_pages() -> Iterator[int]:
    """Addresses of what can be one huge page of this process's own."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        span, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            first, end = (int(text, 16) for text in span.split("-"))
            first = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            yield from range(first, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)


# Lets the kernel end a process whose parent ends, however that comes.


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process killed when its parent ends; also while Python cannot run.

    Linux only. A process that forks this one must not end between the fork and this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
