"""Number of processors available to this process."""

import os


def num_processors() -> int:
    """Those that this process may run on; where the system does not tell these, all there are."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
