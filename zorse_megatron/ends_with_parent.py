"""Lets the kernel end a process whose parent ends, however that comes."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process killed when its parent ends; also while Python cannot run.

    Linux only. A process that forks this one must not end between the fork and this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
