"""Makes forks of a process that has torch and Megatron imported cheap, in time and in memory.

For servers that fork one rank after another. Measured with 5 ranks that train for one step on two
cores of a virtual machine: 0.55 CPU-s a rank before, 0.45 after.
"""

import ctypes
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

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
